package lease

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

func TestRemainingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Second / 2)
		now := time.Now()
		for _, test := range []struct {
			expires int64
			want    time.Duration
		}{
			{now.Unix() + 3, 2500 * time.Millisecond},
			{now.Unix(), 0},
			{0, 0},
			{-1, 0},
			{math.MinInt64, 0},
			{math.MaxInt64, longestLease - time.Second/2},
		} {
			lease := &doorman.Lease{ExpiryTime: proto.Int64(test.expires)}
			if left := remaining(lease, now); left != test.want {
				t.Errorf("%v are left until %d, not %v", left, test.expires, test.want)
			}
		}
	})
}

// TestWantsAreValid asks for what applications say.
func TestWantsAreValid(t *testing.T) {
	leases := New(nil, "", nil, nil)
	for _, test := range []struct{ wants, asked float64 }{
		{5, 5},
		{-1, 0},
		{math.NaN(), 0},
		{math.Inf(-1), 0},
		{math.Inf(1), mostWants},
	} {
		settings := Settings{Wants: &test.wants}
		k := kept{resource: newResource(leases, "db", settings, unmeasured{})}
		request := k.request(0, time.Now())
		if request.GetWants() != test.asked || request.Has != nil {
			t.Errorf("%v for wants of %v", request, test.wants)
		}
	}
}

func TestAnswersWithoutAValidCapacity(t *testing.T) {
	leases := New(nil, "", nil, nil)
	now := time.Now()
	for _, test := range []struct {
		capacity, safe     float64
		during, afterwards float64
	}{
		{5, 3, 5, 3},
		{-5, -2, 0, 0},
		{math.NaN(), math.NaN(), 0, 0},
		{math.Inf(1), math.Inf(1), math.Inf(1), math.Inf(1)},
		{math.Inf(-1), math.Inf(-1), 0, 0},
		{0, noBound, 0, math.Inf(1)},
	} {
		k := kept{resource: newResource(leases, "db", Settings{}, unmeasured{})}
		k.answered(&doorman.ResourceResponse{
			Gets: &doorman.Lease{
				ExpiryTime: proto.Int64(math.MaxInt64),
				Capacity:   &test.capacity,
			},
			SafeCapacity: &test.safe,
		}, now)
		during := k.resource.capacity(now)
		afterwards := k.resource.capacity(now.Add(longestLease))
		if during != test.during || afterwards != test.afterwards {
			t.Errorf("%+v: got %v and %v", test, during, afterwards)
		}
	}
}
