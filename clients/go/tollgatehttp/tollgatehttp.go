// Package tollgatehttp takes a token before each request that an HTTP server handles, or an HTTP
// client makes.
//
//	| no token                                      | a server answers         | a client gets            |
//	| refused                                       | 429 with Retry-After     | 429 with Retry-After     |
//	| no node decides, and there is no fallback     | 503                      | the error                |
//	| the bucket's name is invalid                  | 400                      | the error                |
//	| the request's context ends                    | 503                      | the error of the context |
//
// Retry-After is left out where nobody knows when to try again.
package tollgatehttp

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

// BucketOf says which bucket a request takes a token of; false if it takes none.
type BucketOf func(*http.Request) (tollgate.Bucket, bool)

// Middleware takes a token before each request that a handler gets. Without the option
// [tollgate.MaxWait], a request that would have to wait is refused. If the context of the request
// ends first, tokens that were granted are lost.
//
//	quota := tollgatehttp.Middleware(client, func(r *http.Request) (tollgate.Bucket, bool) {
//		return tollgate.Bucket{Namespace: "web", Name: "requests"}, r.URL.Path != "/health"
//	})
//	http.ListenAndServe("127.0.0.1:8080", quota(handler))
func Middleware(client *tollgate.Client, bucketOf BucketOf, options ...tollgate.RequestOption) func(http.Handler) http.Handler {
	quota := quota{client, bucketOf, withoutWait(options)}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			err := quota.take(r)
			if err == nil {
				next.ServeHTTP(w, r)
				return
			}
			setRetryAfter(w.Header(), err)
			text, status := answerTo(err)
			http.Error(w, text, status)
		})
	}
}

// Transport takes a token before each request that base makes; [http.DefaultTransport] if it is nil.
// Without the option [tollgate.MaxWait], a request that would have to wait is refused: the response
// is 429, as that of a server that refuses.
//
//	client := &http.Client{Transport: tollgatehttp.Transport(nil, quota, bucketOf, tollgate.MaxWait(time.Second))}
func Transport(base http.RoundTripper, client *tollgate.Client, bucketOf BucketOf, options ...tollgate.RequestOption) http.RoundTripper {
	if base == nil {
		base = http.DefaultTransport
	}
	return &transport{base, quota{client, bucketOf, withoutWait(options)}}
}

type quota struct {
	client   *tollgate.Client
	bucketOf BucketOf
	options  []tollgate.RequestOption
}

func withoutWait(options []tollgate.RequestOption) []tollgate.RequestOption {
	return append([]tollgate.RequestOption{tollgate.MaxWait(0)}, options...)
}

// take takes a token for a request.
func (q *quota) take(r *http.Request) error {
	bucket, ok := q.bucketOf(r)
	if !ok {
		return nil
	}
	_, err := q.client.Acquire(r.Context(), bucket.Namespace, bucket.Name, q.options...)
	return err
}

type transport struct {
	base  http.RoundTripper
	quota quota
}

// RoundTrip makes a request that gets a token.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	err := t.quota.take(r)
	if err == nil {
		return t.base.RoundTrip(r)
	}
	if r.Body != nil {
		r.Body.Close()
	}
	var refused *tollgate.RefusedError
	if !errors.As(err, &refused) {
		return nil, err
	}
	return refusal(r, refused), nil
}

// CloseIdleConnections closes those of the transport below, as http.Client expects it.
func (t *transport) CloseIdleConnections() {
	if base, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

// refusal is the response to a request that is not made.
func refusal(r *http.Request, err error) *http.Response {
	text := err.Error()
	response := &http.Response{
		Status:        "429 Too Many Requests",
		StatusCode:    http.StatusTooManyRequests,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        http.Header{"Content-Type": {"text/plain; charset=utf-8"}},
		Body:          io.NopCloser(strings.NewReader(text)),
		ContentLength: int64(len(text)),
		Request:       r,
	}
	setRetryAfter(response.Header, err)
	return response
}

func answerTo(err error) (text string, status int) {
	var refused *tollgate.RefusedError
	switch {
	case errors.As(err, &refused):
		return err.Error(), http.StatusTooManyRequests
	case errors.Is(err, tollgate.ErrInvalid):
		return err.Error(), http.StatusBadRequest
	default:
		// Why there is no decision is not for everybody.
		return "no decision", http.StatusServiceUnavailable
	}
}

func setRetryAfter(header http.Header, err error) {
	var refused *tollgate.RefusedError
	if errors.As(err, &refused) && refused.Decision.RetryAfter > 0 {
		// Rounded up: earlier is too early.
		seconds := (refused.Decision.RetryAfter-1)/time.Second + 1
		header.Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
	}
}
