// Package fault says why there is no answer, or no use of a lease.
package fault

import "errors"

// Why there is no answer. An *Error is one of them, by errors.Is.
var (
	ErrInvalid       = errors.New("invalid request")
	ErrTimeout       = errors.New("no answer within the deadline")
	ErrUnreachable   = errors.New("no node can be reached")
	ErrOverloaded    = errors.New("the nodes are overloaded")
	ErrForbidden     = errors.New("the nodes do not allow it")
	ErrNotConfigured = errors.New("the limits do not have it")
	ErrClosed        = errors.New("closed")
	ErrFailed        = errors.New("a node has answered with an error")
)

// Error is one of the above with a message of its own.
type Error struct {
	Kind    error
	Message string
}

func (e *Error) Error() string { return e.Message }

func (e *Error) Unwrap() error { return e.Kind }

// ReasonOf names an error for the metrics.
func ReasonOf(err error) string {
	for _, one := range []struct {
		kind error
		name string
	}{
		{ErrTimeout, "timeout"}, {ErrUnreachable, "unreachable"}, {ErrOverloaded, "overloaded"},
		{ErrForbidden, "forbidden"}, {ErrNotConfigured, "not_configured"},
	} {
		if errors.Is(err, one.kind) {
			return one.name
		}
	}
	return "error"
}
