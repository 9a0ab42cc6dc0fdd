package smart

import (
	"container/list"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

const (
	// mostTokens is the most that a stock holds.
	mostTokens = 1 << 60

	// troubleTime is how long the reason is true why there are no tokens.
	troubleTime = 2 * time.Second
)

// stock is what the application and the keeper share.
type stock struct {
	// free are the tokens that anybody may use. While callers wait, there are
	// none: all are reserved for them. Only those who hold the lock add some;
	// to take some needs no lock.
	free atomic.Int64
	// low wakes the keeper when fewer tokens than these are free.
	low atomic.Int64
	// refused counts all tokens that were refused.
	refused atomic.Int64
	// isWoken says that the keeper was woken, and has not looked since.
	isWoken atomic.Bool
	// bell wakes the keeper.
	bell chan struct{}
	// start starts a keeper.
	start func()
	// cancel ends the keeper.
	cancel context.CancelFunc

	mu sync.Mutex
	// granted are all tokens that came and were not thrown away: those that
	// were used, are free or reserved.
	granted int64
	// reserved are the tokens for the callers that wait: fewer than the first
	// one needs.
	reserved int64
	// waiters are the callers that wait, in the order of their calls.
	waiters list.List
	// waiting are the tokens that they wait for.
	waiting int64
	trouble trouble
	// isKept says that there is a keeper.
	isKept   bool
	isClosed bool
}

// waiter is a caller who waits.
type waiter struct {
	tokens int64
	// place is that in the queue; nil once it has left it.
	place *list.Element
	// done gets nil if the tokens are used, else why there are none.
	done chan error
}

// trouble is why there are no tokens; the zero value if there are.
type trouble struct {
	at     time.Time
	answer Answer
}

func (s *stock) init(start func(), cancel context.CancelFunc) {
	s.bell, s.start, s.cancel = make(chan struct{}, 1), start, cancel
}

// take uses tokens if they are free.
func (s *stock) take(tokens int64) bool {
	for {
		free := s.free.Load()
		if free < tokens {
			return false
		}
		if s.free.CompareAndSwap(free, free-tokens) {
			if free-tokens < s.low.Load() {
				s.wake()
			}
			return true
		}
	}
}

// refuse counts tokens that were not there.
func (s *stock) refuse(tokens int64) {
	s.refused.Add(tokens)
	s.wake()
}

// wake has the keeper look, and starts one if there is none.
func (s *stock) wake() {
	if s.isWoken.Load() || s.isWoken.Swap(true) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed {
		return
	}
	if !s.isKept {
		s.isKept = true
		s.start()
	}
	select {
	case s.bell <- struct{}{}:
	default:
	}
}

// letGo ends the keeper, unless it was woken.
func (s *stock) letGo() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Whoever wakes it later finds that there is none.
	if s.isWoken.Load() && !s.isClosed {
		return false
	}
	s.isKept = false
	return true
}

// wait has a caller wait for tokens.
func (s *stock) wait(tokens int64) (*waiter, error) {
	w := &waiter{tokens: tokens, done: make(chan error, 1)}
	s.mu.Lock()
	if s.isClosed {
		s.mu.Unlock()
		return nil, fault.ErrClosed
	}
	w.place = s.waiters.PushBack(w)
	s.waiting += tokens
	s.reserved += s.free.Swap(0)
	s.serve()
	s.mu.Unlock()
	// After it can be seen that they are waited for.
	s.wake()
	return w, nil
}

// giveUp ends the wait of a caller, with the error of its context, or because it
// has waited for long enough. It returns nil if the tokens have come meanwhile.
func (s *stock) giveUp(w *waiter, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.place == nil {
		return <-w.done
	}
	s.leave(w)
	// The next one may need fewer.
	s.serve()
	if err != nil {
		return err
	}
	s.refused.Add(w.tokens)
	return s.trouble.err()
}

// leave takes a caller from the queue.
func (s *stock) leave(w *waiter) {
	s.waiters.Remove(w.place)
	w.place = nil
	s.waiting -= w.tokens
}

// serve gives the reserved tokens to those who wait, in their order.
func (s *stock) serve() {
	for first := s.waiters.Front(); first != nil; first = s.waiters.Front() {
		w := first.Value.(*waiter)
		if w.tokens > s.reserved {
			return
		}
		s.reserved -= w.tokens
		s.leave(w)
		w.done <- nil
	}
	s.free.Add(s.reserved)
	s.reserved = 0
}

// add adds tokens.
func (s *stock) add(tokens int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble = trouble{}
	if s.isClosed {
		return
	}
	tokens = min(tokens, mostTokens-s.there())
	s.granted += tokens
	s.reserved += tokens
	s.serve()
}

// there are the tokens that were not used.
func (s *stock) there() int64 { return s.free.Load() + s.reserved }

// throwAway leaves no more than so many free.
func (s *stock) throwAway(keep int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		free := s.free.Load()
		if free <= keep {
			return
		}
		if s.free.CompareAndSwap(free, keep) {
			s.granted -= free - keep
			return
		}
	}
}

// figures are what the keeper needs to know.
type figures struct {
	// used and refused are all tokens that were.
	used, refused int64
	// there are the tokens that are left, and waiting those that are waited for.
	there, waiting int64
}

func (s *stock) look() figures {
	s.mu.Lock()
	defer s.mu.Unlock()
	there := s.there()
	return figures{
		used: s.granted - there, refused: s.refused.Load(), there: there, waiting: s.waiting,
	}
}

// tell says why there are no tokens. If nobody knows when there will be some,
// those who wait are told.
func (s *stock) tell(answer Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble = trouble{at: time.Now(), answer: answer}
	if answer.Kind != Later {
		s.dismiss(func() error { return answer.Err(answer.RetryAfter) })
	}
}

// dismiss tells all who wait that there are no tokens.
func (s *stock) dismiss(why func() error) {
	for first := s.waiters.Front(); first != nil; first = s.waiters.Front() {
		w := first.Value.(*waiter)
		s.leave(w)
		s.refused.Add(w.tokens)
		w.done <- why()
	}
	s.serve()
}

// err is the error for a caller who has waited for long enough.
func (t *trouble) err() error {
	elapsed := time.Since(t.at)
	if t.answer.Err == nil || elapsed > troubleTime {
		return ErrLate
	}
	if t.answer.Kind == Later {
		// 0 would say that nobody knows.
		return t.answer.Err(max(t.answer.RetryAfter-elapsed, 1))
	}
	return t.answer.Err(t.answer.RetryAfter)
}

// close throws all tokens away, and ends the keeper.
func (s *stock) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isClosed = true
	s.granted -= s.free.Swap(0) + s.reserved
	s.reserved = 0
	s.dismiss(func() error { return fault.ErrClosed })
	s.cancel()
}
