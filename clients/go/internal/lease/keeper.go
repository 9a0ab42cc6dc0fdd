package lease

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

const (
	// answerTimeout is how long an answer may take.
	answerTimeout = 2 * time.Second

	// retry is the pause after a refresh that has failed, and the least
	// interval between two refreshes of all.
	retry = time.Second

	// leastPause is the least time between two requests for a resource that is
	// in a hurry.
	leastPause = 100 * time.Millisecond

	// longestInterval is the longest time between two refreshes.
	longestInterval = time.Hour

	// refusedPause is the time after which a resource that the nodes refuse to
	// lease is asked for again.
	refusedPause = 30 * time.Second

	// mostCalls is the number of calls of one refresh or release after which
	// groups that are refused are not split any more.
	mostCalls = 100

	// second is how often demand is measured.
	second = time.Second
)

// keeper asks for the leases of a client, refreshes all in one call, and
// releases them.
type keeper struct {
	leases *Leases
	kept   []*kept
	// secondBegan is when the present second of demand began.
	secondBegan time.Time
	nextRefresh time.Time
	// lastCall is when the last call for leases was made.
	lastCall time.Time
	// refusedUntil is when those that the nodes refuse to lease are asked for
	// again, all together.
	refusedUntil time.Time
	isFailing    bool
}

func newKeeper(leases *Leases) *keeper {
	now := time.Now()
	return &keeper{leases: leases, secondBegan: now, nextRefresh: now}
}

// run runs until no handle is left, or the client is closed.
func (k *keeper) run(ended chan<- struct{}) {
	defer close(ended)
	for {
		live, isOver := k.leases.live(len(k.kept) > 0)
		if isOver {
			k.release(k.forget(k.kept))
			return
		}
		gone := k.forget(k.take(live))
		k.measure()
		var releasing sync.WaitGroup
		if len(gone) > 0 {
			// At the same time as the refresh, as it is of other resources.
			releasing.Go(func() { k.release(gone) })
		}
		k.refresh()
		releasing.Wait()
		if len(k.kept) > 0 {
			k.sleep()
		}
	}
}

// take begins to keep new resources. It returns those that have no handle any
// more.
func (k *keeper) take(live map[string]*resource) (gone []*kept) {
	var all []*kept
	for _, known := range k.kept {
		switch id := known.resource.id; live[id] {
		case known.resource:
			all = append(all, known)
			delete(live, id)
		case nil:
			gone = append(gone, known)
		default:
			// It has another handle already, and is asked for instead.
		}
	}
	for _, id := range slices.Sorted(maps.Keys(live)) {
		all = append(all, &kept{resource: live[id]})
	}
	k.kept = all
	return gone
}

// forget tells the metrics that leases end. It returns those to release.
func (k *keeper) forget(gone []*kept) (names []string) {
	for _, one := range gone {
		k.leases.metrics.Lease(one.resource.id, 0, 0)
		// The release of one that is refused would be refused, with all others.
		if !one.isRefused {
			names = append(names, one.resource.id)
		}
	}
	return names
}

// measure measures the demand once a second.
func (k *keeper) measure() {
	now := time.Now()
	elapsed := now.Sub(k.secondBegan)
	if elapsed < second {
		return
	}
	for _, one := range k.kept {
		capacity := one.measure(elapsed.Seconds(), now)
		k.leases.metrics.Lease(one.resource.id, one.asked, capacity)
	}
	k.secondBegan = now
}

// soon is when what is urgent may be asked for, all in one call.
func (k *keeper) soon() time.Time {
	if k.isFailing {
		return k.lastCall.Add(retry)
	}
	return k.lastCall.Add(leastPause)
}

// sleep waits until there is something to do.
func (k *keeper) sleep() {
	now := time.Now()
	wake := k.secondBegan.Add(second)
	if k.nextRefresh.Before(wake) {
		wake = k.nextRefresh
	}
	for _, one := range k.kept {
		if soon := k.soon(); soon.Before(wake) && one.isUrgent() {
			wake = soon
		}
	}
	timer := time.NewTimer(wake.Sub(now))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.leases.bell:
	}
}

// refresh asks for all resources in one call if it is time to, else for those
// that can't wait.
func (k *keeper) refresh() {
	now := time.Now()
	isTime, isSoon := !now.Before(k.nextRefresh), !now.Before(k.soon())
	var due []*kept
	for _, one := range k.kept {
		isRefused := one.isRefused && now.Before(k.refusedUntil)
		if (isTime && !isRefused) || (isSoon && one.isUrgent()) {
			due = append(due, one)
		}
	}
	if len(due) == 0 && !isTime {
		return
	}
	interval, err := k.ask(due)
	k.schedule(interval, isTime)
	if err != nil {
		k.leases.metrics.RefreshFailed()
		if !k.isFailing {
			k.leases.logger.Warn("leases are not refreshed; tried again every second", "error", err)
		}
	}
	k.isFailing = err != nil
}

// schedule sets the time of the next refresh of all, after one of all or of
// some.
func (k *keeper) schedule(interval time.Duration, wasAll bool) {
	now := time.Now()
	interval = min(max(interval, retry), longestInterval)
	// Clients that began together do not stay together.
	next := now.Add(time.Duration((0.9 + 0.1*rand.Float64()) * float64(interval)))
	for _, one := range k.kept {
		if one.isRefused && k.refusedUntil.Before(next) {
			next = k.refusedUntil
		}
	}
	if least := now.Add(retry); next.Before(least) && wasAll {
		next = least
	}
	if wasAll || next.Before(k.nextRefresh) {
		k.nextRefresh = next
	}
}

// ask asks for these resources in one call. If the nodes refuse the call
// because of a resource, it asks for each half, so that the others get their
// leases. It returns the time until the next refresh.
func (k *keeper) ask(due []*kept) (interval time.Duration, failure error) {
	interval = longestInterval
	// Those that were refused before may be again, and are not asked for with
	// the others.
	var refused, others []*kept
	for _, one := range due {
		if one.isRefused {
			refused = append(refused, one)
		} else {
			others = append(others, one)
		}
	}
	groups := [][]*kept{refused, others}
	for calls := 0; len(groups) > 0; {
		group := groups[len(groups)-1]
		groups = groups[:len(groups)-1]
		switch {
		case len(group) == 0:
			continue
		case failure != nil:
			// No node answers: they are not asked again and again.
			notAnswered(group)
			continue
		}
		answer, err := k.getCapacity(group)
		calls++
		switch {
		case err == nil:
			interval = min(interval, takeAnswers(group, answer))
		case isRefused(err) && len(group) > 1 && calls < mostCalls:
			half := len(group) / 2
			groups = append(groups, group[half:], group[:half])
		case isRefused(err) && len(group) > 1 && !group[0].isRefused:
			// Not all of them may be refused. The others of the group will be
			// found at the next refreshes.
			notAnswered(group)
			interval = retry
		case isRefused(err):
			k.takeRefusal(group, err)
		case errors.Is(err, fault.ErrUnreachable):
			notAnswered(group)
			interval, failure = retry, err
		default:
			for _, one := range group {
				one.maybeAnswered()
			}
			interval, failure = retry, err
		}
	}
	return interval, failure
}

func notAnswered(group []*kept) {
	for _, one := range group {
		one.notAnswered()
	}
}

// getCapacity makes one call.
func (k *keeper) getCapacity(group []*kept) (*doorman.GetCapacityResponse, error) {
	now := time.Now()
	k.lastCall = now
	seconds := now.Sub(k.secondBegan).Seconds()
	request := &doorman.GetCapacityRequest{ClientId: proto.String(k.leases.clientID)}
	for _, one := range group {
		request.Resource = append(request.Resource, one.request(seconds, now))
	}
	ctx, cancel := context.WithTimeout(k.leases.context, answerTimeout)
	defer cancel()
	return k.leases.caller.GetCapacity(ctx, request)
}

// takeAnswers gives each resource its answer. It returns the time until the
// next refresh.
func takeAnswers(group []*kept, answer *doorman.GetCapacityResponse) time.Duration {
	answers := make(map[string]*doorman.ResourceResponse)
	for _, one := range answer.GetResponse() {
		id := one.GetResourceId()
		if _, isTwice := answers[id]; isTwice {
			// A node that answers twice for a resource has not answered.
			one = nil
		}
		answers[id] = one
	}
	interval, now := longestInterval, time.Now()
	for _, one := range group {
		answer := answers[one.resource.id]
		if answer.GetGets() == nil {
			interval = min(interval, retry)
			one.notAnswered()
			continue
		}
		// Bounded, as large numbers overflow.
		seconds := min(max(answer.GetGets().GetRefreshInterval(), 0), int64(longestInterval/time.Second))
		interval = min(interval, time.Duration(seconds)*time.Second)
		one.answered(answer, now)
	}
	return interval
}

// takeRefusal leaves resources alone for a while that the nodes refuse to
// lease.
func (k *keeper) takeRefusal(group []*kept, err error) {
	if now := time.Now(); !now.Before(k.refusedUntil) {
		k.refusedUntil = now.Add(refusedPause)
	}
	for _, one := range group {
		k.leases.logger.Warn("the nodes refuse to lease a resource",
			"resource", one.resource.id, "error", err)
		one.refused()
	}
}

// release releases leases. If the nodes refuse the call because of a resource,
// it releases each half.
func (k *keeper) release(names []string) {
	ctx, cancel := context.WithTimeout(k.leases.context, answerTimeout)
	defer cancel()
	groups := [][]string{names}
	for calls := 0; len(groups) > 0 && calls < mostCalls; {
		group := groups[len(groups)-1]
		groups = groups[:len(groups)-1]
		if len(group) == 0 {
			continue
		}
		calls++
		err := k.releaseCapacity(ctx, group)
		if err == nil {
			continue
		}
		k.leases.logger.Debug("leases are not released, and end when they expire", "error", err)
		if !isRefused(err) {
			return
		}
		if len(group) > 1 {
			half := len(group) / 2
			groups = append(groups, group[half:], group[:half])
		}
	}
}

// releaseCapacity makes one call.
func (k *keeper) releaseCapacity(ctx context.Context, names []string) error {
	_, err := k.leases.caller.ReleaseCapacity(ctx, &doorman.ReleaseCapacityRequest{
		ClientId:   proto.String(k.leases.clientID),
		ResourceId: names,
	})
	return err
}

// isRefused says whether the request is wrong or not allowed, and will be the
// next time.
func isRefused(err error) bool {
	return errors.Is(err, fault.ErrInvalid) || errors.Is(err, fault.ErrForbidden)
}
