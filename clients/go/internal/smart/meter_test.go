package smart

import (
	"testing"
	"time"
)

func TestMeterCountsTheDemandOfTheLastSecond(t *testing.T) {
	var m meter
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	want := func(demanded int64, isSteady bool) {
		t.Helper()
		if m.demanded() != demanded || m.isSteady() != isSteady {
			t.Errorf("%d, steady: %v", m.demanded(), m.isSteady())
		}
	}
	want(0, false)
	for tenth := range 21 {
		m.count(int64(tenth*5), at(tenth*100))
	}
	want(50, true)
	m.count(100, at(2500))
	want(25, true)
	m.count(100, at(3200))
	want(0, false)
	m.count(107, at(9000))
	want(7, false)
	if len(m.counts) > 2 {
		t.Errorf("%d counts", len(m.counts))
	}
	for us := range 20_000 {
		m.count(int64(107+us), at(9000).Add(time.Duration(us)*100*time.Microsecond))
	}
	if len(m.counts) > 55 || cap(m.counts) > 200 {
		t.Errorf("%d counts, room for %d", len(m.counts), cap(m.counts))
	}
	if demanded := m.demanded(); demanded < 9_800 || demanded > 10_400 {
		t.Error(demanded)
	}
}
