// Package charge takes from buckets what requests have cost beyond their tokens.
//
// What a bucket is charged is put together for a tenth of a second, and taken
// from it in the background. While anything is charged, one goroutine makes the
// calls.
package charge

import (
	"context"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tollgate/tollgate/clients/go/internal/throttle"
)

const (
	// together is how long charges are put together.
	together = 100 * time.Millisecond

	// answerTimeout is how long an answer may take.
	answerTimeout = 2 * time.Second

	// mostBuckets is the most buckets with charges at a time.
	mostBuckets = 10_000

	// longestClose is how long closing may take.
	longestClose = 5 * time.Second

	// mostCalls is the most calls at a time.
	mostCalls = 16
)

// Bucket is the name of a bucket.
type Bucket struct{ Namespace, Name string }

// Asker asks a bucket for tokens once, until the context ends, and returns what
// came of it.
type Asker func(ctx context.Context, bucket Bucket, tokens int64) Outcome

// Metrics is told about the charges. It is called by several goroutines at once.
type Metrics interface {
	// Charged is called with the tokens that were taken.
	Charged(tokens int64)
}

// Charges are the charges of one client.
type Charges struct {
	asker   Asker
	metrics Metrics
	logger  *slog.Logger
	log     throttle.Log

	// context is that of all calls, and ends when the client has been closed.
	context context.Context
	cancel  context.CancelFunc
	// closing is closed when the client is being closed: what is charged is not
	// put together any longer.
	closing chan struct{}

	mu sync.Mutex
	// open is what is charged and not taken yet.
	open map[Bucket]charge
	// ended is closed when the goroutine has ended; nil if there is none.
	ended    chan struct{}
	isClosed bool
}

// New returns the charges of a client that has none yet.
func New(asker Asker, metrics Metrics, logger *slog.Logger) *Charges {
	ctx, cancel := context.WithCancel(context.Background())
	return &Charges{
		asker: asker, metrics: metrics, logger: logger,
		context: ctx, cancel: cancel, closing: make(chan struct{}),
		open: make(map[Bucket]charge),
	}
}

// Add charges a bucket with tokens. Fewer than one, and those after Close, are
// ignored.
func (c *Charges) Add(bucket Bucket, tokens int64) {
	if tokens < 1 {
		return
	}
	if why := c.add(bucket, tokens); why != "" {
		c.logDropped(bucket, why)
	}
}

// add returns why a charge is dropped; nothing if it is not.
func (c *Charges) add(bucket Bucket, tokens int64) (why string) {
	if !utf8.ValidString(bucket.Namespace) || !utf8.ValidString(bucket.Name) {
		return "a name is not UTF-8"
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known, isKnown := c.open[bucket]
	switch {
	case c.isClosed:
		return "the client is closed"
	case isKnown:
		known.add(tokens)
	case len(c.open) < mostBuckets:
		known = newCharge(tokens, time.Now())
	default:
		return "there are charges of too many buckets"
	}
	c.open[bucket] = known
	if c.ended == nil {
		c.ended = make(chan struct{})
		go c.run(c.ended)
	}
	return ""
}

// Close tries once more to take all that is charged, for five seconds at most.
func (c *Charges) Close() {
	defer c.cancel()
	c.mu.Lock()
	if !c.isClosed {
		c.isClosed = true
		close(c.closing)
	}
	ended := c.ended
	c.mu.Unlock()
	if ended == nil {
		return
	}
	timer := time.NewTimer(longestClose)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
}

// run takes what is charged, until nothing is or the client is closed.
func (c *Charges) run(ended chan<- struct{}) {
	defer close(ended)
	for {
		isLast := c.rest()
		c.takeAll(c.due(isLast))
		if isLast {
			c.giveUp()
			return
		}
		if c.isOver() {
			return
		}
	}
}

// rest waits for more charges. It returns whether the client is being closed.
func (c *Charges) rest() (isClosing bool) {
	timer := time.NewTimer(together)
	defer timer.Stop()
	select {
	case <-c.closing:
		return true
	case <-timer.C:
		return false
	}
}

// item is what one bucket is charged.
type item struct {
	bucket Bucket
	charge charge
}

// due returns what is due, or all that is open.
func (c *Charges) due(all bool) (due []item) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for bucket, charge := range c.open {
		if all || !charge.due.After(now) {
			due = append(due, item{bucket, charge})
		}
	}
	return due
}

// takeAll takes what is due, a few buckets at a time.
func (c *Charges) takeAll(due []item) {
	var calls sync.WaitGroup
	next := make(chan item)
	for range min(mostCalls, len(due)) {
		calls.Go(func() {
			for one := range next {
				c.take(one.bucket, one.charge)
			}
		})
	}
	for _, one := range due {
		next <- one
	}
	close(next)
	calls.Wait()
}

// take takes what one bucket is charged.
func (c *Charges) take(bucket Bucket, charge charge) {
	turn := newTurn(charge, time.Now())
	for turn.goesOn(time.Now()) && c.context.Err() == nil {
		tokens := turn.next()
		ctx, cancel := context.WithTimeout(c.context, answerTimeout)
		outcome := c.asker(ctx, bucket, tokens)
		cancel()
		if outcome.Kind == Taken {
			c.metrics.Charged(outcome.Tokens)
		}
		if outcome.Kind == Never {
			c.logDropped(bucket, outcome.Why)
		}
		turn.take(outcome, tokens, time.Now())
	}
	if c.end(bucket, &turn) {
		c.logDropped(bucket, "nothing could be taken for a minute")
	}
}

// end keeps what is left of a charge. It returns whether that is dropped because
// it is too old.
func (c *Charges) end(bucket Bucket, turn *turn) (isTooOld bool) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	left := turn.end(c.open[bucket])
	isTooOld = left.tokens > 0 && left.isTooOld(now)
	if left.tokens == 0 || isTooOld {
		delete(c.open, bucket)
	} else {
		c.open[bucket] = left
	}
	return isTooOld
}

// isOver says whether the goroutine has to end, because nothing is charged. After
// that, the next charge starts another one.
func (c *Charges) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) > 0 {
		return false
	}
	c.ended = nil
	return true
}

// giveUp drops what could not be taken before the end.
func (c *Charges) giveUp() {
	c.mu.Lock()
	open := c.open
	c.open = make(map[Bucket]charge)
	c.mu.Unlock()
	for bucket := range open {
		c.logDropped(bucket, "the client is closed")
	}
}

func (c *Charges) logDropped(bucket Bucket, why string) {
	if heldBack, ok := c.log.Pass(); ok {
		c.logger.Warn("a bucket can't be charged", "namespace", bucket.Namespace,
			"bucket", bucket.Name, "why", why, slog.Int("held_back", heldBack))
	}
}
