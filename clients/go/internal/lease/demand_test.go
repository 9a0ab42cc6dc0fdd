package lease

import "testing"

func TestDemandIsAveragedAndGrowsAtOnce(t *testing.T) {
	var d demand
	steps := []struct {
		// add is what was demanded in one more second; negative for none.
		add, present, wants float64
	}{
		{-1, 0, 0},
		{-1, 3, 3},
		{10, 0, 12},
		{0, 0, 6},
		{-1, 7, 7},
		{40, 0, 40},
	}
	for i, step := range steps {
		if step.add >= 0 {
			d.add(step.add)
		}
		if wants := d.wants(step.present); wants != step.wants {
			t.Errorf("step %d: wants %v, not %v", i, wants, step.wants)
		}
	}
	for range demandWindow {
		d.add(0)
	}
	if wants := d.wants(0); wants != 0 {
		t.Errorf("wants %v after a window without demand", wants)
	}
}
