package smart

import (
	"slices"
	"time"
)

const (
	// window is the time over which demand is measured.
	window = time.Second

	// apart is the least time between two counts that are kept.
	apart = 20 * time.Millisecond

	// steady is how long demand is spread over that is not a burst.
	steady = 100 * time.Millisecond
)

// meter counts the tokens that were demanded in the last second.
type meter struct {
	// counts are how many had been demanded since the start. The first is the
	// last one of the time before the window.
	counts []count
}

type count struct {
	at       time.Time
	demanded int64
}

// count says that so many were demanded since the start.
func (m *meter) count(demanded int64, now time.Time) {
	if n := len(m.counts); n >= 2 && m.counts[n-2].at.Add(apart).After(now) {
		m.counts = m.counts[:n-1]
	}
	m.counts = append(m.counts, count{now, demanded})
	past := 0
	for past+1 < len(m.counts) && !m.counts[past+1].at.Add(window).After(now) {
		past++
	}
	m.counts = slices.Delete(m.counts, 0, past)
}

// isSteady says whether the tokens were demanded over a while, not all at once.
func (m *meter) isSteady() bool {
	var first, last time.Time
	for i := 1; i < len(m.counts); i++ {
		if m.counts[i].demanded == m.counts[i-1].demanded {
			continue
		}
		if first.IsZero() {
			first = m.counts[i].at
		}
		last = m.counts[i].at
	}
	return !first.IsZero() && last.Sub(first) >= steady
}

// demanded are the tokens that were demanded in the last second.
func (m *meter) demanded() int64 {
	if len(m.counts) == 0 {
		return 0
	}
	return m.counts[len(m.counts)-1].demanded - m.counts[0].demanded
}
