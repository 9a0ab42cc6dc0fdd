package tollgate

import (
	"time"
	"unicode/utf8"

	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
)

// Request is what is asked for.
type Request struct {
	Namespace, Bucket string
	Tokens            int64

	// Negative without one: the bucket's own limit counts.
	maxWait time.Duration
	// 0 without one: that of the client counts.
	deadline      time.Duration
	isNotCritical bool
}

// Bucket names a bucket, for the functions that say which one a call takes tokens of. Where users
// choose a name, the limits need max_dynamic_buckets: each name makes a bucket.
type Bucket struct{ Namespace, Name string }

// RequestOption changes what is asked for.
type RequestOption func(*Request)

// Tokens sets the number of tokens; without it, and with 0, it is 1.
func Tokens(tokens int64) RequestOption {
	return func(r *Request) { r.Tokens = tokens }
}

// MaxWait sets the longest wait for the tokens, in whole milliseconds. Without it the bucket's own
// limit decides. [Client.Allow] accepts no longer wait than the bucket's own limit in any case;
// [Client.Acquire] asks again until this time is over. Parts of a millisecond are cut off, and a negative
// time means 0. The interceptors and the middleware wait only with this option.
func MaxWait(maxWait time.Duration) RequestOption {
	return func(r *Request) { r.maxWait = max(maxWait, 0) }
}

// Deadline sets how long to wait for an answer, instead of the client's deadline, which 0 stands for.
// The wait for the tokens comes on top of it. A deadline of the context counts, too: the answer gets
// three quarters of that time at most.
func Deadline(deadline time.Duration) RequestOption {
	return func(r *Request) { r.deadline = deadline }
}

// NotCritical leaves what the bucket keeps in reserve for critical requests.
func NotCritical() RequestOption {
	return func(r *Request) { r.isNotCritical = true }
}

func newRequest(namespace, bucket string, options []RequestOption) Request {
	request := Request{Namespace: namespace, Bucket: bucket, Tokens: 1, maxWait: -1}
	for _, option := range options {
		option(&request)
	}
	if request.Tokens == 0 {
		request.Tokens = 1
	}
	return request
}

// longestName is longer than any name that a node takes.
const longestName = 4096

// check finds mistakes that a node can't be told: it would not get the request.
func (r *Request) check() error {
	switch {
	case !utf8.ValidString(r.Namespace) || !utf8.ValidString(r.Bucket):
		return invalid("a name is not UTF-8")
	case len(r.Namespace) > longestName || len(r.Bucket) > longestName:
		return invalid("a name is too long")
	case r.Tokens < 0:
		return invalid("a negative number of tokens")
	}
	return nil
}

func (r *Request) hasMaxWait() bool { return r.maxWait >= 0 }

func (r *Request) message() *quotaservice.AllowRequest {
	message := &quotaservice.AllowRequest{
		Namespace:       r.Namespace,
		BucketName:      r.Bucket,
		TokensRequested: r.Tokens,
		Criticality:     quotaservice.AllowRequest_CRITICAL,
	}
	if r.isNotCritical {
		message.Criticality = quotaservice.AllowRequest_NOT_CRITICAL
	}
	if r.hasMaxWait() {
		// Rounded down: a wait is never longer than the caller said.
		message.MaxWaitMillisOverride = r.maxWait.Milliseconds()
		message.MaxWaitTimeOverride = true
	}
	return message
}
