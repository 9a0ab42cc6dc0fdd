// Package throttle limits repeated log messages.
package throttle

import (
	"sync"
	"time"
)

// Log passes one message a second, and counts the others. The zero value has passed none.
type Log struct {
	mu       sync.Mutex
	next     time.Time
	heldBack int
}

// Pass says whether to write a message now, and how many were held back since the last one.
func (l *Log) Pass() (heldBack int, ok bool) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.next) {
		l.heldBack++
		return 0, false
	}
	heldBack, l.heldBack, l.next = l.heldBack, 0, now.Add(time.Second)
	return heldBack, true
}
