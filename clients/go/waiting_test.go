package tollgate

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestTheWholeTakesNoLongerThanTheWaitAndOneAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ms = time.Millisecond
		waiting := waiting{time.Now(), 1000 * ms, 200 * ms}
		answer := func(expected time.Duration) {
			t.Helper()
			if waiting.answer() != expected {
				t.Fatal(waiting.answer())
			}
		}
		between := func(pause time.Duration, ok bool) func(least, most time.Duration) {
			return func(least, most time.Duration) {
				t.Helper()
				if !ok || pause < least || pause > most {
					t.Fatal(pause, ok)
				}
			}
		}
		none := func(pause time.Duration, ok bool) {
			t.Helper()
			if ok {
				t.Fatal(pause)
			}
		}
		answer(200 * ms)
		between(waiting.pause(400*ms))(400*ms, 440*ms)
		between(waiting.pause(1*ms))(20*ms, 22*ms)
		between(waiting.pause(1000*ms))(1000*ms, 1000*ms)
		none(waiting.pause(1001 * ms))
		between(waiting.pauseOfGuess(400*ms))(300*ms, 500*ms)
		between(waiting.pauseOfGuess(longest))(1000*ms, 1000*ms)
		time.Sleep(900 * ms)
		answer(200 * ms)
		none(waiting.pause(101 * ms))
		// The last attempt.
		between(waiting.pauseOfGuess(5000*ms))(100*ms, 100*ms)
		time.Sleep(100 * ms)
		none(waiting.pause(1 * ms))
		none(waiting.pauseOfGuess(1 * ms))
		time.Sleep(150 * ms)
		answer(50 * ms)
	})
}
