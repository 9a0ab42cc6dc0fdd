// Package testkit starts what the tests of the library need: nodes and Redis as processes on free
// ports, a proxy that makes faults of the network, and certificates. All of it ends with its test.
package testkit

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Limit is the time that anything may take, even on a busy machine.
const Limit = 30 * time.Second

// Eventually waits until something holds.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(Limit); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", Limit, what)
		}
	}
}

// FreePort returns a port of 127.0.0.1 that nobody listens on.
func FreePort(t testing.TB) int {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

// DeadAddress is one that nobody listens on.
const DeadAddress = "127.0.0.1:1"

// Process is a process of a test.
type Process struct {
	command *exec.Cmd
	ended   chan struct{}
}

// start starts a process that is killed when its test ends.
func start(t testing.TB, command *exec.Cmd) *Process {
	t.Helper()
	endWithTest(command)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	p := &Process{command, make(chan struct{})}
	go func() {
		command.Wait()
		close(p.ended)
	}()
	t.Cleanup(p.Kill)
	return p
}

// Kill kills the process, and waits for its end.
func (p *Process) Kill() {
	p.command.Process.Kill()
	<-p.ended
}

// Signal sends a signal.
func (p *Process) Signal(signal syscall.Signal) { p.command.Process.Signal(signal) }

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Binary is the path of the server.
func Binary(t testing.TB) string {
	t.Helper()
	path := os.Getenv("TOLLGATE_BINARY")
	if path == "" {
		t.Fatal("set TOLLGATE_BINARY to the path of the tollgate binary")
	}
	return path
}

// Node is a node that serves.
type Node struct {
	*Process
	// Where it serves, each 127.0.0.1:PORT.
	GRPC, HTTP string
}

// StartNode starts a node with these limits, in YAML.
func StartNode(t testing.TB, limits string, arguments ...string) *Node {
	t.Helper()
	return StartNodeAt(t, 0, limits, arguments...)
}

// StartNodeAt starts a node that serves gRPC at a port.
func StartNodeAt(t testing.TB, port int, limits string, arguments ...string) *Node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "limits.yaml")
	if err := os.WriteFile(file, []byte(limits), 0o600); err != nil {
		t.Fatal(err)
	}
	arguments = append([]string{
		"serve", "--limits", file, "--log-format", "json", "--http-listen", "127.0.0.1:0",
		"--grpc-listen", fmt.Sprintf("127.0.0.1:%d", port),
	}, arguments...)
	command := exec.Command(Binary(t), arguments...)
	lines, log := io.Pipe()
	command.Stderr = log
	node := &Node{Process: start(t, command)}
	serving := make(chan struct{})
	go node.read(lines, serving)
	go func() {
		<-node.Ended()
		log.Close()
	}()
	select {
	case <-serving:
	case <-node.Ended():
		t.Fatalf("the node ends: %v", arguments)
	case <-time.After(Limit):
		t.Fatal("the node does not start")
	}
	return node
}

// read reads the log, so that the node can write it.
func (n *Node) read(lines io.Reader, serving chan<- struct{}) {
	for scanner := bufio.NewScanner(lines); scanner.Scan(); {
		var event struct{ Message, GRPC, HTTP string }
		if json.Unmarshal(scanner.Bytes(), &event) == nil && event.Message == "serving" {
			n.GRPC, n.HTTP = event.GRPC, event.HTTP
			close(serving)
		}
	}
}

var sample = regexp.MustCompile(`^(\w+)(?:\{(.*)\})? (\S+)$`)

// Metric is the sum of a metric's samples that have all of these labels, each name="value".
func (n *Node) Metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	response, err := http.Get("http://" + n.HTTP + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return Sum(string(text), name, labels...)
}

// Sum is the sum of a metric's samples in a text that have all of these labels.
func Sum(text, name string, labels ...string) (sum float64) {
	for line := range strings.Lines(text) {
		found := sample.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if found == nil || found[1] != name {
			continue
		}
		has := true
		for _, label := range labels {
			has = has && strings.Contains(","+found[2]+",", ","+label+",")
		}
		if value, err := strconv.ParseFloat(found[3], 64); has && err == nil {
			sum += value
		}
	}
	return sum
}

// Decisions is how many decisions the node has made.
func (n *Node) Decisions(t testing.TB, labels ...string) float64 {
	t.Helper()
	return n.Metric(t, "tollgate_decisions_total", labels...)
}

// Redis is a Redis server.
type Redis struct {
	*Process
	port int
}

// StartRedis starts a Redis server.
func StartRedis(t testing.TB) *Redis {
	t.Helper()
	redis := &Redis{port: FreePort(t)}
	redis.Start(t)
	return redis
}

// Start starts it, or starts it again, empty.
func (r *Redis) Start(t testing.TB) {
	t.Helper()
	command := exec.Command("redis-server", "--port", strconv.Itoa(r.port), "--bind", "127.0.0.1",
		"--save", "", "--loglevel", "warning")
	command.Dir = t.TempDir()
	r.Process = start(t, command)
	Eventually(t, "Redis answers", func() bool {
		dialer := net.Dialer{Timeout: Limit}
		connection, err := dialer.DialContext(context.Background(), "tcp", fmt.Sprintf("127.0.0.1:%d", r.port))
		if err != nil {
			return false
		}
		defer connection.Close()
		fmt.Fprint(connection, "PING\r\n")
		answer, _ := bufio.NewReader(connection).ReadString('\n')
		return strings.HasPrefix(answer, "+PONG")
	})
}

// URL is its address.
func (r *Redis) URL() string { return fmt.Sprintf("redis://127.0.0.1:%d", r.port) }
