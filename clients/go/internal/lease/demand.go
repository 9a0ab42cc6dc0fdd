package lease

const (
	// demandWindow is the number of seconds whose demand is averaged.
	demandWindow = 10

	// headroom is asked for on top of the average, so that small fluctuations
	// do not have to wait.
	headroom = 1.2
)

// demand is what the application demanded in each of the last seconds, the
// latest at the end.
type demand struct {
	seconds []float64
}

// add records the demand of the second that has just ended.
func (d *demand) add(demanded float64) {
	if len(d.seconds) == demandWindow {
		d.seconds = append(d.seconds[:0], d.seconds[1:]...)
	}
	d.seconds = append(d.seconds, demanded)
}

// wants is the average with headroom, or the demand of the last or the present
// second if that is more: it grows at once and shrinks slowly.
func (d *demand) wants(present float64) float64 {
	if len(d.seconds) == 0 {
		return present
	}
	sum := 0.0
	for _, demanded := range d.seconds {
		sum += demanded
	}
	average := sum / float64(len(d.seconds))
	return max(headroom*average, d.seconds[len(d.seconds)-1], present)
}
