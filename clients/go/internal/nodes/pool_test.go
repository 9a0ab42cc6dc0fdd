package nodes

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

// While another one is still being connected.
func TestACallThatWaitsFindsANodeWhoseTrialHasEnded(t *testing.T) {
	pool := &Pool{}
	pool.changed.init()
	onTrial, connecting := &node{pool: pool}, &node{pool: pool}
	pool.view.Store(&view{[]*node{onTrial, connecting}, true})
	onTrial.circuit.checked(false)
	onTrial.circuit.checked(true)
	trial, err, ok := onTrial.pass(time.Now())
	if !ok {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := pool.attempt(short, nil); !errors.Is(err, fault.ErrTimeout) {
		t.Fatal(err)
	}
	time.AfterFunc(lookInterval/2, func() { onTrial.report(trial, outcome{report: answered}) })
	long, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if found, _, err := pool.attempt(long, nil); found != onTrial {
		t.Fatal(found, err)
	}
}
