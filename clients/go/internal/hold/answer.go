package hold

import (
	"fmt"
	"math"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

// By says who has decided.
type By string

// Who decides, by the labels of the metrics.
const (
	ByNode         By = "node"
	ByDegradedNode By = "degraded_node"
	ByFallback     By = "fallback"
)

// Answer is the answer to a request for copies.
type Answer struct {
	// Copies is how many are granted; 0 if the request is refused.
	Copies int64
	// Shadow says whether so many were granted only because the limits are not
	// enforced yet.
	Shadow bool
	// RetryAfter is a guess of when to ask again after a refusal; 0 for never.
	RetryAfter time.Duration
	// By is who has decided.
	By By
}

// IsGranted says whether copies are granted.
func (a Answer) IsGranted() bool { return a.Copies > 0 }

// answerOf reads the answer of a node.
func answerOf(response *holds.ReserveResponse) (Answer, error) {
	answer := Answer{By: ByNode}
	if response.GetDegraded() {
		answer.By = ByDegradedNode
	}
	switch response.GetStatus() {
	case holds.ReserveResponse_OK:
		if response.GetGranted() <= 0 {
			return Answer{}, failed("granted %d", response.GetGranted())
		}
		answer.Copies, answer.Shadow = response.GetGranted(), response.GetShadow()
		return answer, nil
	case holds.ReserveResponse_REJECTED:
		const most = math.MaxInt64 / int64(time.Millisecond)
		millis := min(max(response.GetRetryAfterMillis(), 0), most)
		answer.RetryAfter = time.Duration(millis) * time.Millisecond
		return answer, nil
	}
	return Answer{}, failed("the status %d is unknown to this version", response.GetStatus())
}

func failed(format string, arguments ...any) error {
	return &fault.Error{Kind: fault.ErrFailed, Message: fmt.Sprintf(format, arguments...)}
}
