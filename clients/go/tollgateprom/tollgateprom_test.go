package tollgateprom

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestTheNumberOfLabelsIsBounded(t *testing.T) {
	metrics := New()
	for at := range 2 * mostNamespaces {
		metrics.Answered(fmt.Sprint(at), "granted", "node")
	}
	metrics.Answered("0", "granted", "node")
	if found := testutil.CollectAndCount(metrics.requests); found != mostNamespaces+1 {
		t.Fatal(found)
	}
	count := func(namespace string) float64 {
		return testutil.ToFloat64(metrics.requests.WithLabelValues(namespace, "granted", "node"))
	}
	if count("0") != 2 || count("") != mostNamespaces {
		t.Fatal(count("0"), count(""))
	}
}

func TestTheMetricsCanBeRegistered(t *testing.T) {
	metrics := New()
	metrics.Answered("a", "granted", "node")
	metrics.Lease("db", 1, 2)
	metrics.TenantAnswered("hold", "granted", "node")
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(metrics)
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
}
