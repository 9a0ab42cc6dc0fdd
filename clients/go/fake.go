package tollgate

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
)

// Fake answers requests in place of nodes, so that unit tests need none:
//
//	fake := tollgate.NewFake(tollgate.FakeGrant())
//	fake.Answer("db", "reads", tollgate.FakeRefuse(2*time.Second))
//	client := fake.Client()
//
// It works in the bubbles of testing/synctest, where waits take no time. With a fake, a client has no
// memory of refusals.
type Fake struct {
	mu         sync.Mutex
	byDefault  FakeAnswer
	answers    map[[2]string]FakeAnswer
	asked      map[[2]string][]int64
	capacities map[string]float64
	tenants    fakeTenants
}

// FakeAnswer is how a [Fake] answers.
type FakeAnswer struct {
	to func(*quotaservice.AllowRequest) (*quotaservice.AllowResponse, error)
}

func answerBy(to func(*quotaservice.AllowRequest) (*quotaservice.AllowResponse, error)) FakeAnswer {
	return FakeAnswer{to}
}

// FakeGrant grants the tokens.
func FakeGrant() FakeAnswer { return FakeGrantAfter(0) }

// FakeGrantAfter grants the tokens after a wait, if the request accepts it.
func FakeGrantAfter(wait time.Duration) FakeAnswer {
	millis := millisUp(wait)
	return answerBy(func(request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		if most := request.MaxWaitMillisOverride; request.MaxWaitTimeOverride && millis > most {
			return refuse(quotaservice.AllowResponse_REJECTED_TIMEOUT, millis-most)
		}
		return &quotaservice.AllowResponse{TokensGranted: request.TokensRequested, WaitMillis: millis}, nil
	})
}

// FakeRefuse refuses the request, and says when to try again; 0 means never.
func FakeRefuse(retryAfter time.Duration) FakeAnswer {
	return fakeRefusal(quotaservice.AllowResponse_REJECTED_TIMEOUT, millisUp(retryAfter))
}

// FakeRate grants so many tokens a second, and up to burst at once.
func FakeRate(perSecond float64, burst int64) FakeAnswer {
	rate := newRate(perSecond, burst)
	return answerBy(func(request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		if retryAfter, ok := rate.take(request.TokensRequested, time.Now()); !ok {
			return refuse(quotaservice.AllowResponse_REJECTED_TIMEOUT, millisUp(retryAfter))
		}
		return &quotaservice.AllowResponse{TokensGranted: request.TokensRequested}, nil
	})
}

// FakeNoBucket says that there is no such bucket.
func FakeNoBucket() FakeAnswer {
	return fakeRefusal(quotaservice.AllowResponse_REJECTED_NO_BUCKET, 0)
}

// FakeInvalid says that the request is invalid.
func FakeInvalid() FakeAnswer {
	return fakeRefusal(quotaservice.AllowResponse_REJECTED_INVALID_REQUEST, 0)
}

// FakeNoNode is no answer: what happens next is up to the client's fallback. As the answer of
// [NewFake], it is one to leases, too.
func FakeNoNode() FakeAnswer {
	return answerBy(func(*quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		return nil, ErrUnreachable
	})
}

func fakeRefusal(status quotaservice.AllowResponse_Status, retryAfterMillis int64) FakeAnswer {
	return answerBy(func(*quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		return refuse(status, retryAfterMillis)
	})
}

func refuse(status quotaservice.AllowResponse_Status, retryAfterMillis int64) (*quotaservice.AllowResponse, error) {
	return &quotaservice.AllowResponse{Status: status, RetryAfterMillis: retryAfterMillis}, nil
}

// millisUp is whole milliseconds, rounded up: a wait is never shorter than it must be.
func millisUp(wait time.Duration) int64 {
	millis := wait.Milliseconds()
	if wait%time.Millisecond > 0 {
		millis++
	}
	return millis
}

// NewFake answers all requests in the same way, until told otherwise.
func NewFake(answer FakeAnswer) *Fake {
	return &Fake{
		byDefault: answer, answers: map[[2]string]FakeAnswer{},
		asked: map[[2]string][]int64{}, capacities: map[string]float64{},
		tenants: newFakeTenants(),
	}
}

// Client makes a client of this fake.
func (f *Fake) Client(options ...Option) *Client {
	return newClient(&fakeBackend{Fake: f}, newSettings(options))
}

// Answer sets the answer for one bucket.
func (f *Fake) Answer(namespace, bucket string, answer FakeAnswer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[[2]string{namespace, bucket}] = answer
}

// Asked returns the numbers of tokens that a bucket was asked for, in order.
func (f *Fake) Asked(namespace, bucket string) []int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]int64(nil), f.asked[[2]string{namespace, bucket}]...)
}

// Capacity sets the capacity of a resource, all of which the client gets if it wants it. Without this,
// the client gets all that it wants.
func (f *Fake) Capacity(resource string, capacity float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.capacities[resource] = capacity
}

// fakeBackend has a fake answer.
type fakeBackend struct {
	*Fake
	isClosed atomic.Bool
}

func (f *fakeBackend) allow(_ context.Context, request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
	if f.isClosed.Load() {
		return nil, ErrClosed
	}
	bucket := [2]string{request.Namespace, request.BucketName}
	f.mu.Lock()
	answer, ok := f.answers[bucket]
	if !ok {
		answer = f.byDefault
	}
	f.asked[bucket] = append(f.asked[bucket], request.TokensRequested)
	f.mu.Unlock()
	return answer.to(request)
}

func (f *fakeBackend) GetCapacity(_ context.Context, request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.byDefault.to(&quotaservice.AllowRequest{}); err != nil {
		return nil, err
	}
	response := &doorman.GetCapacityResponse{}
	for _, asked := range request.Resource {
		capacity := asked.GetWants()
		if known, ok := f.capacities[asked.GetResourceId()]; ok {
			capacity = min(known, capacity)
		}
		id, expiry, interval := asked.GetResourceId(), int64(math.MaxInt64), int64(1)
		response.Response = append(response.Response, &doorman.ResourceResponse{
			ResourceId: &id,
			Gets:       &doorman.Lease{ExpiryTime: &expiry, RefreshInterval: &interval, Capacity: &capacity},
		})
	}
	return response, nil
}

func (f *fakeBackend) ReleaseCapacity(context.Context, *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error) {
	return &doorman.ReleaseCapacityResponse{}, nil
}

func (f *fakeBackend) remembersRefusals() bool { return false }

func (f *fakeBackend) close() { f.isClosed.Store(true) }
