package tollgate

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
	"github.com/tollgate/tollgate/clients/go/internal/nodes"
)

const (
	// defaultDeadline is that of a request that has none of its own. A node needs up to 50 ms, or
	// what --store-timeout says, to find that the store does not answer.
	defaultDeadline = 200 * time.Millisecond
	// A longer deadline means this one.
	longestDeadline = 24 * time.Hour
)

// settings are those of a client.
type settings struct {
	files         connect.Files
	clientID      string
	deadline      time.Duration
	fallbacks     fallbacks
	onRefused     func(Request, Decision)
	onSoftLimited func(Request, Decision)
	// Of hits and holds.
	onTenantRefused func(TenantRequest, TenantDecision)
	metrics         Metrics
	logger          *slog.Logger
}

// Option is a setting of a client.
type Option func(*settings)

// New makes a client of the nodes at these addresses, each HOST:PORT, http://HOST:PORT or
// https://HOST:PORT. A name may have several addresses, each of which is a node; it is resolved again
// every 30 seconds. Calls are spread over all nodes that are well.
//
// It begins to connect, and reads the files, but does not wait for the nodes: a request waits for the
// first connection, up to its deadline. Call [Client.Close] in the end.
func New(addresses []string, options ...Option) (*Client, error) {
	settings := newSettings(options)
	credentials, err := connect.Load(settings.files, settings.logger)
	if err != nil {
		return nil, err
	}
	targets, err := connect.Targets(addresses, credentials, settings.logger)
	if err != nil {
		return nil, err
	}
	nodes := nodes.Connect(targets, nodes.Settings{Logger: settings.logger, Metrics: settings.metrics})
	return newClient(pool{nodes}, settings), nil
}

// FromEnv makes a client with the settings in the environment: TOLLGATE_ADDRESS, one or more addresses
// separated by commas; and TOLLGATE_CA_FILE, TOLLGATE_SERVER_NAME, TOLLGATE_CERT_FILE with
// TOLLGATE_KEY_FILE, and TOLLGATE_TOKEN_FILE, as the command line reads them. Options count instead of
// them, or besides.
func FromEnv(options ...Option) (*Client, error) {
	var addresses []string
	for one := range strings.SplitSeq(os.Getenv("TOLLGATE_ADDRESS"), ",") {
		if one = strings.TrimSpace(one); one != "" {
			addresses = append(addresses, one)
		}
	}
	files := connect.Files{
		CA:         os.Getenv("TOLLGATE_CA_FILE"),
		ServerName: os.Getenv("TOLLGATE_SERVER_NAME"),
		Cert:       os.Getenv("TOLLGATE_CERT_FILE"),
		Key:        os.Getenv("TOLLGATE_KEY_FILE"),
		Token:      os.Getenv("TOLLGATE_TOKEN_FILE"),
	}
	if (files.Cert == "") != (files.Key == "") {
		return nil, errors.New("TOLLGATE_CERT_FILE and TOLLGATE_KEY_FILE belong together")
	}
	environment := func(s *settings) { s.files = files }
	return New(addresses, append([]Option{environment}, options...)...)
}

func newSettings(options []Option) settings {
	settings := settings{
		fallbacks: fallbacks{
			namespaces: map[string]Fallback{}, buckets: map[[2]string]Fallback{},
			resources: map[string]Fallback{},
		},
	}
	for _, option := range options {
		option(&settings)
	}
	if settings.deadline <= 0 {
		settings.deadline = defaultDeadline
	}
	if settings.metrics == nil {
		settings.metrics = NoMetrics{}
	}
	if settings.logger == nil {
		settings.logger = slog.Default()
	}
	if settings.clientID == "" {
		host, err := os.Hostname()
		if err != nil || host == "" {
			host = "client"
		}
		settings.clientID = fmt.Sprintf("%s:%d:%08x", host, os.Getpid(), rand.Uint32())
	}
	return settings
}

// WithCAFile turns on TLS: the file of the CA certificates that the nodes' certificates are verified
// with (PEM). This and the other files are read again when they change.
func WithCAFile(path string) Option { return func(s *settings) { s.files.CA = path } }

// WithServerName sets the name in the nodes' certificates, if it is not that of the address.
func WithServerName(name string) Option { return func(s *settings) { s.files.ServerName = name } }

// WithCertificate sets the files of the client's certificate and its private key (PEM).
func WithCertificate(cert, key string) Option {
	return func(s *settings) { s.files.Cert, s.files.Key = cert, key }
}

// WithTokenFile names a file whose only line is the bearer token for the nodes.
func WithTokenFile(path string) Option { return func(s *settings) { s.files.Token = path } }

// WithClientID sets the name that leases are held by, which no other client may have at the same
// time; by default host name, process id and a random number.
func WithClientID(id string) Option { return func(s *settings) { s.clientID = id } }

// WithDeadline sets how long to wait for an answer before the fallback decides; by default, and with 0, 200 ms. It
// includes connecting, and asking another node when one fails.
func WithDeadline(deadline time.Duration) Option {
	return func(s *settings) { s.deadline = min(deadline, longestDeadline) }
}

// WithFallback sets what decides when no node does. Without it, that is an error.
func WithFallback(fallback Fallback) Option {
	return func(s *settings) { s.fallbacks.everything = fallback }
}

// WithNamespaceFallback sets what decides for the buckets of a namespace, instead of [WithFallback].
func WithNamespaceFallback(namespace string, fallback Fallback) Option {
	return func(s *settings) { s.fallbacks.namespaces[namespace] = fallback }
}

// WithBucketFallback sets what decides for one bucket, instead of [WithNamespaceFallback].
func WithBucketFallback(namespace, bucket string, fallback Fallback) Option {
	return func(s *settings) { s.fallbacks.buckets[[2]string{namespace, bucket}] = fallback }
}

// OnRefused calls a function with each request that is refused, so that the application can serve
// less. It must not block.
func OnRefused(callback func(Request, Decision)) Option {
	return func(s *settings) { s.onRefused = callback }
}

// OnSoftLimited calls a function with each grant past the bucket's soft limit: refusals may follow. It
// must not block.
func OnSoftLimited(callback func(Request, Decision)) Option {
	return func(s *settings) { s.onSoftLimited = callback }
}

// WithMetrics sets what is told of all that the client does.
func WithMetrics(metrics Metrics) Option { return func(s *settings) { s.metrics = metrics } }

// WithLogger sets where the client logs outages and the use of fallbacks; by default [slog.Default]. It
// must not block.
func WithLogger(logger *slog.Logger) Option { return func(s *settings) { s.logger = logger } }
