package lease

import (
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

const (
	// mostWants is the most that is asked for; it stands for no bound.
	mostWants = 1e15

	// noBound is the safe capacity that stands for no bound.
	noBound = -1

	// longestLease bounds the computed time of a lease.
	longestLease = 365 * 24 * time.Hour
)

// kept is what the keeper knows of one resource beyond what its handle sees.
type kept struct {
	resource *resource
	demand   demand
	// lease is the last one; nil if there was none.
	lease *doorman.Lease
	// safe is the safe capacity; nil if no node has said it.
	safe *float64
	// asked is what was asked for last.
	asked float64
	// wasAsked says that it was asked for, once.
	wasAsked bool
	// isRefused says that the nodes refuse to lease it.
	isRefused bool
}

// remaining is how long a lease is valid from now on; 0 if it has expired.
func remaining(lease *doorman.Lease, now time.Time) time.Duration {
	// Bounded, as times far away overflow.
	most := now.Add(longestLease).Unix()
	expires := time.Unix(min(max(lease.GetExpiryTime(), 0), most), 0)
	// By the time of day, which is the clock of leases: expires has no other.
	return max(expires.Sub(now), 0)
}

// request returns what to ask for, some seconds after the last second of demand
// began.
func (k *kept) request(seconds float64, now time.Time) *doorman.ResourceRequest {
	k.asked, k.wasAsked = k.wants(seconds), true
	request := &doorman.ResourceRequest{
		ResourceId: proto.String(k.resource.id),
		Priority:   proto.Int64(0),
		Wants:      proto.Float64(k.asked),
	}
	if k.lease != nil && remaining(k.lease, now) > 0 {
		request.Has = k.lease
	}
	return request
}

// wants is what to ask for now. What is demanded later is not in this request,
// and can make the next one urgent.
func (k *kept) wants(seconds float64) float64 {
	k.resource.mu.Lock()
	defer k.resource.mu.Unlock()
	k.resource.isUrgent = false
	var wants float64
	if k.resource.wants != nil {
		wants = *k.resource.wants
	} else {
		// What has come in a part of a second is not multiplied.
		wants = k.demand.wants(k.resource.usage.demand(max(seconds, 1)))
	}
	// A request with an invalid number would be refused.
	return min(notNegative(wants), mostWants)
}

// answered takes the answer of a node.
func (k *kept) answered(answer *doorman.ResourceResponse, now time.Time) {
	// A degraded node may not know the safe capacity, and does not take it back.
	if answer.SafeCapacity != nil || !answer.GetDegraded() {
		k.safe = answer.SafeCapacity
	}
	capacity := notNegative(answer.GetGets().GetCapacity())
	k.lease = &doorman.Lease{
		ExpiryTime:      proto.Int64(answer.GetGets().GetExpiryTime()),
		RefreshInterval: proto.Int64(answer.GetGets().GetRefreshInterval()),
		Capacity:        proto.Float64(capacity),
	}
	k.isRefused = false
	answered := held{
		capacity: capacity,
		expires:  now.Add(remaining(k.lease, now)),
		after:    k.after(),
		isAll:    capacity >= k.asked*(1-rounding),
	}
	k.resource.hold(func(h *held) { *h = answered })
}

// notAnswered leaves what is held until it runs out.
func (k *kept) notAnswered() {
	k.resource.hold(func(h *held) { h.after, h.isAll = k.after(), false })
}

// maybeAnswered is notAnswered where a node may have lent what was asked for,
// and the rest to others.
func (k *kept) maybeAnswered() {
	k.resource.hold(func(h *held) {
		h.after, h.isAll = k.after(), false
		h.capacity = min(h.capacity, k.asked)
	})
}

// refused is notAnswered where the nodes refuse to lease the resource.
func (k *kept) refused() {
	k.notAnswered()
	k.isRefused = true
}

// after is the capacity without a lease.
func (k *kept) after() float64 {
	switch {
	case k.resource.mode == Optimistic:
		return k.asked
	case k.resource.mode == Pessimistic || k.safe == nil:
		return 0
	case *k.safe == noBound:
		return math.Inf(1)
	}
	return notNegative(*k.safe)
}

// isUrgent says whether the resource has to be asked for soon: it can't wait
// for the next refresh of all.
func (k *kept) isUrgent() bool {
	if !k.wasAsked {
		return true
	}
	k.resource.mu.Lock()
	defer k.resource.mu.Unlock()
	return k.resource.isUrgent && !k.isRefused
}

// measure records the demand of the second that has just ended, which took some
// seconds. It returns what is leased now.
func (k *kept) measure(seconds float64, now time.Time) (capacity float64) {
	k.resource.mu.Lock()
	defer k.resource.mu.Unlock()
	k.demand.add(k.resource.usage.demand(seconds))
	k.resource.usage.beginSecond()
	return k.resource.held.at(now)
}
