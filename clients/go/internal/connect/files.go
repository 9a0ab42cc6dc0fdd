package connect

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/throttle"
)

// mostBytes is the largest file that is read.
const mostBytes = 16 << 20

// reloaded is what was made of files, made anew when they change.
type reloaded[T any] struct {
	paths []string
	load  func() (T, error)
	// The least time between two looks at the files.
	interval time.Duration
	// Said of files that can't be used any more.
	message string
	logger  *slog.Logger
	log     throttle.Log

	mu           sync.Mutex
	looked       time.Time
	seen         []os.FileInfo
	current      T
	isRefreshing bool
}

func (r *reloaded[T]) init() (err error) {
	r.looked, r.seen = time.Now(), look(r.paths)
	r.current, err = r.load()
	return err
}

// get returns the present value, or the last one if the files can't be used any more. A change that
// is half finished is one; a later call tries again. It waits for a file no longer than the context
// lasts, and not while another call does.
func (r *reloaded[T]) get(ctx context.Context) T {
	r.mu.Lock()
	current, now := r.current, time.Now()
	isDue := !r.isRefreshing && now.Sub(r.looked) >= r.interval
	if isDue {
		r.looked, r.isRefreshing = now, true
	}
	r.mu.Unlock()
	if !isDue {
		return current
	}
	refreshed := make(chan T, 1)
	go func() { refreshed <- r.refresh() }()
	select {
	case current = <-refreshed:
	case <-ctx.Done():
	}
	return current
}

func (r *reloaded[T]) refresh() T {
	seen := look(r.paths)
	r.mu.Lock()
	isSame := areSame(seen, r.seen)
	r.mu.Unlock()
	var value T
	var err error
	if !isSame {
		value, err = r.load()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.isRefreshing = false
	if err != nil {
		if heldBack, ok := r.log.Pass(); ok {
			r.logger.Error(r.message, "error", err, "held_back", heldBack)
		}
	} else if !isSame {
		r.current, r.seen = value, seen
	}
	return r.current
}

// look returns what tells whether files have changed.
func look(paths []string) []os.FileInfo {
	seen := make([]os.FileInfo, len(paths))
	for at, path := range paths {
		// An error is found when the file is read.
		seen[at], _ = os.Stat(path)
	}
	return seen
}

func areSame(a, b []os.FileInfo) bool {
	for at := range a {
		if a[at] == nil || b[at] == nil || !os.SameFile(a[at], b[at]) ||
			a[at].Size() != b[at].Size() || !a[at].ModTime().Equal(b[at].ModTime()) {
			return false
		}
	}
	return true
}

// readFile reads a file. Errors name it.
func readFile(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("can't read %s: %w", path, err)
	}
	defer file.Close()
	// One byte beyond the maximum is enough to find a file that is too large.
	bytes, err := io.ReadAll(io.LimitReader(file, mostBytes+1))
	if err == nil && len(bytes) > mostBytes {
		err = fmt.Errorf("larger than %d MiB", mostBytes>>20)
	}
	if err != nil {
		return nil, fmt.Errorf("can't read %s: %w", path, err)
	}
	return bytes, nil
}

// readSecret reads the only line of a file. Errors name the file, but never quote what is in it.
func readSecret(path string) (string, error) {
	bytes, err := readFile(path)
	if err != nil {
		return "", err
	}
	text := strings.TrimRight(string(bytes), "\r\n")
	if text == "" || strings.ContainsAny(text, "\r\n") {
		return "", fmt.Errorf("%s: must hold one line, and nothing else", path)
	}
	return text, nil
}
