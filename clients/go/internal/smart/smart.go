// Package smart takes tokens of a bucket ahead of need, so that their use costs
// no call to a node.
//
// A [Bucket] is used by the application. What is there, and who waits for more,
// is its stock. While there are tokens, or demand for them, one goroutine, the
// keeper, asks for more and throws away what nobody uses.
package smart

import (
	"context"
	"errors"
	"sync"
	"time"
)

// ErrLate is returned when the tokens would have come too late, and nobody has
// said why.
var ErrLate = errors.New("the tokens come too late")

// Asker asks a bucket for tokens once. It returns soon after the context ends.
type Asker interface {
	// Ask asks for tokens that come within maxWait; if it is negative, as soon
	// as the bucket's own limit says.
	Ask(ctx context.Context, tokens int64, maxWait time.Duration) Answer
}

// Kind is the kind of an answer.
type Kind int

// The kinds.
const (
	// Failed means that nobody knows when there will be tokens.
	Failed Kind = iota
	// Granted means that the tokens may be used, after a wait.
	Granted
	// Later means that there will be tokens.
	Later
	// TooMany means that the bucket never gives as many at once.
	TooMany
)

// Answer is what a bucket answers.
type Answer struct {
	Kind Kind

	// Tokens is how many were granted, 1 at least.
	Tokens int64
	// Wait is the time until they may be used.
	Wait time.Duration

	// RetryAfter is the time after which as many could be granted, if they come
	// later.
	RetryAfter time.Duration
	// Debt is how long the bucket takes to pay its debt.
	Debt time.Duration
	// Err returns the refusal or failure, with another retry time.
	Err func(retryAfter time.Duration) error

	// Level is where the bucket stands; zero if that is not known.
	Level Level
}

// Metrics is told about the tokens. It is called by several goroutines at once.
type Metrics interface {
	// SmartTokens is called with the tokens that were used, and those that were
	// refused, since the last call.
	SmartTokens(used, refused int64)
}

// Buckets are the smart buckets of one client.
type Buckets struct {
	metrics Metrics

	mu       sync.Mutex
	open     map[*Bucket]struct{}
	isClosed bool
}

// New returns the smart buckets of a client that has none yet.
func New(metrics Metrics) *Buckets {
	return &Buckets{metrics: metrics, open: make(map[*Bucket]struct{})}
}

// Bucket has tokens that were taken ahead of need. It may be used by several
// goroutines at once.
type Bucket struct {
	buckets *Buckets
	stock   stock
	// keeper is used by the goroutine that runs it, of which there is one at a
	// time.
	keeper keeper
}

// Bucket returns a smart bucket. As many tokens are taken as are used in the
// time ahead. Of a client that is closed, so is the bucket.
func (b *Buckets) Bucket(asker Asker, ahead time.Duration) *Bucket {
	ctx, cancel := context.WithCancel(context.Background())
	bucket := &Bucket{buckets: b}
	bucket.stock.init(func() { go bucket.keeper.run() }, cancel)
	bucket.keeper = newKeeper(ctx, asker, b.metrics, max(ahead, 0), &bucket.stock)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.isClosed {
		bucket.stock.close()
	} else {
		b.open[bucket] = struct{}{}
	}
	return bucket
}

// Close closes all smart buckets.
func (b *Buckets) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.isClosed = true
	for bucket := range b.open {
		bucket.stock.close()
	}
	clear(b.open)
}

// TryAcquire uses tokens, 1 at least, if they are there and nobody waits for
// them.
func (b *Bucket) TryAcquire(tokens int64) bool {
	if b.stock.take(tokens) {
		return true
	}
	b.stock.refuse(tokens)
	return false
}

// Acquire uses tokens, 1 at least, and waits for them up to maxWait. Those who
// came first are served first.
//
// It returns the error of an [Answer], [ErrLate], fault.ErrClosed if the bucket
// or the client is closed, and the context's error if the context ends first:
// then no tokens are used.
func (b *Bucket) Acquire(ctx context.Context, tokens int64, maxWait time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.stock.take(tokens) {
		return nil
	}
	waiter, err := b.stock.wait(tokens)
	if err != nil {
		return err
	}
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	select {
	case err := <-waiter.done:
		return err
	case <-timer.C:
		return b.stock.giveUp(waiter, nil)
	case <-ctx.Done():
		return b.stock.giveUp(waiter, ctx.Err())
	}
}

// Close throws the tokens away. Those who wait get fault.ErrClosed.
func (b *Bucket) Close() {
	b.buckets.mu.Lock()
	delete(b.buckets.open, b)
	b.buckets.mu.Unlock()
	b.stock.close()
}
