package testkit

import (
	"net"
	"sync"
	"testing"
	"time"
)

// Fault is a fault of the network.
type Fault int

const (
	// NoFault is none.
	NoFault Fault = iota
	// NoReplies lets requests arrive; replies are held back until the fault is cleared.
	NoReplies
	// HalfOpen has the server vanish without closing: data is discarded, and open as well as new
	// connections stay dead.
	HalfOpen
	// CutReplies sends half of each reply, then a reset.
	CutReplies
	// Refused resets open connections and refuses new ones.
	Refused
	// ResetOnAccept accepts connections and resets them at once.
	ResetOnAccept
)

// Proxy is a TCP proxy that makes faults, which tests set and clear.
type Proxy struct {
	Address string
	target  string

	mu       sync.Mutex
	fault    Fault
	delay    time.Duration
	changed  chan struct{}
	listener net.Listener
	open     map[net.Conn]bool
	isClosed bool
}

// StartProxy starts a proxy of an address.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p := &Proxy{target: target, Address: "127.0.0.1:0", changed: make(chan struct{}), open: map[net.Conn]bool{}}
	if err := p.listen(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// Delay adds a delay in each direction.
func (p *Proxy) Delay(t testing.TB, delay time.Duration) {
	t.Helper()
	p.set(t, NoFault, delay)
}

// Set replaces the present fault or delay.
func (p *Proxy) Set(t testing.TB, fault Fault) {
	t.Helper()
	p.set(t, fault, 0)
}

func (p *Proxy) set(t testing.TB, fault Fault, delay time.Duration) {
	t.Helper()
	p.mu.Lock()
	p.fault, p.delay = fault, delay
	close(p.changed)
	p.changed = make(chan struct{})
	listener := p.listener
	if fault == Refused {
		p.listener = nil
	}
	p.mu.Unlock()
	if fault == Refused && listener != nil {
		listener.Close()
	}
	if fault == Refused || fault == ResetOnAccept {
		p.resetAll()
	}
	if fault != Refused && listener == nil {
		if err := p.listen(); err != nil {
			t.Fatal(err)
		}
	}
}

func (p *Proxy) listen() error {
	listener, err := net.Listen("tcp", p.Address)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.listener, p.Address = listener, listener.Addr().String()
	p.mu.Unlock()
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			go p.serve(near)
		}
	}()
	return nil
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.isClosed = true
	listener := p.listener
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	if listener != nil {
		listener.Close()
	}
	p.resetAll()
}

// now returns the present fault and delay, and a channel that is closed when they change.
func (p *Proxy) now() (fault Fault, delay time.Duration, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fault, p.delay, p.changed
}

// keep remembers a connection. Returns false if there must be no more.
func (p *Proxy) keep(connection net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isClosed && p.fault != Refused && p.fault != ResetOnAccept {
		p.open[connection] = true
		return true
	}
	return false
}

func (p *Proxy) resetAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for connection := range p.open {
		reset(connection)
		delete(p.open, connection)
	}
}

func (p *Proxy) end(connection net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, connection)
	connection.Close()
}

// reset has the other side see a reset.
func reset(connection net.Conn) {
	connection.(*net.TCPConn).SetLinger(0)
	connection.Close()
}

func (p *Proxy) serve(near net.Conn) {
	if !p.keep(near) {
		reset(near)
		return
	}
	defer p.end(near)
	if fault, _, _ := p.now(); fault == HalfOpen {
		discard(near)
		return
	}
	far, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	if !p.keep(far) {
		far.Close()
		return
	}
	replies := make(chan struct{})
	go func() {
		defer close(replies)
		defer near.Close()
		p.copy(near, far, true)
	}()
	p.copy(far, near, false)
	p.end(far)
	<-replies
}

func (p *Proxy) copy(to, from net.Conn, isReplies bool) {
	data := make([]byte, 1<<14)
	for {
		size, err := from.Read(data)
		if err != nil {
			return
		}
		fault, delay, changed := p.now()
		for isReplies && fault == NoReplies {
			<-changed
			if fault, delay, changed = p.now(); p.hasEnded() {
				return
			}
		}
		switch {
		case isReplies && fault == CutReplies:
			to.Write(data[:size/2])
			reset(to)
			return
		case fault == HalfOpen:
			continue
		}
		// As long as the chunks of a test are far apart, each is delayed for as long.
		time.Sleep(delay)
		if _, err := to.Write(data[:size]); err != nil {
			return
		}
	}
}

func (p *Proxy) hasEnded() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.isClosed
}

func discard(from net.Conn) {
	data := make([]byte, 1<<14)
	for {
		if _, err := from.Read(data); err != nil {
			return
		}
	}
}
