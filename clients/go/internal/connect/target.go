// Package connect opens connections to nodes: addresses, TLS, and the bearer token.
package connect

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// connectTimeout limits each attempt to connect.
const connectTimeout = 2 * time.Second

// Version is that of the library.
const Version = "0.1.0"

// Target is a server to call, and the credentials for it.
type Target struct {
	Address     Address
	credentials *Credentials
}

// NewTarget refuses an https:// address without TLS, which would send everything in the clear.
func NewTarget(address Address, credentials *Credentials) (Target, error) {
	if address.https && credentials.tls == nil {
		return Target{}, fmt.Errorf("https://%v needs TLS: name the file of its CA certificates", address)
	}
	return Target{address, credentials}, nil
}

// Targets returns those with these addresses.
func Targets(addresses []string, credentials *Credentials, logger *slog.Logger) ([]Target, error) {
	if len(addresses) == 0 {
		return nil, fmt.Errorf("no address of a node is given")
	}
	targets := make([]Target, 0, len(addresses))
	for _, text := range addresses {
		address, err := ParseAddress(text)
		if err != nil {
			return nil, err
		}
		target, err := NewTarget(address, credentials)
		if err != nil {
			return nil, err
		}
		if credentials.token != nil && credentials.tls == nil && address.IsRemote() {
			logger.Warn("the token is sent unencrypted: turn on TLS with a CA file", "address", address.String())
		}
		targets = append(targets, target)
	}
	return targets, nil
}

// With returns the target of another address, with the same credentials.
func (t Target) With(address string) (Target, error) {
	parsed, err := ParseAddress(address)
	if err != nil {
		return Target{}, err
	}
	return NewTarget(parsed, t.credentials)
}

// Resolve returns the IP addresses of the target.
func (t Target) Resolve(ctx context.Context) ([]netip.AddrPort, error) {
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", t.Address.host)
	if err != nil {
		return nil, err
	}
	found := make([]netip.AddrPort, len(ips))
	for at, ip := range ips {
		found[at] = netip.AddrPortFrom(ip.Unmap(), t.Address.port)
	}
	return found, nil
}

// Open returns a connection to one of the target's addresses, HOST:PORT, which connects on first
// use, and again when it breaks. A certificate must still have the name of the target.
func (t Target) Open(to string) (*grpc.ClientConn, error) {
	dialer := net.Dialer{Timeout: connectTimeout}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(t.credentials.transport()),
		grpc.WithAuthority(t.Address.String()),
		grpc.WithUserAgent("tollgate-client-go/" + Version),
		// Not by a proxy of the environment.
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
	}
	if t.credentials.token != nil {
		options = append(options, grpc.WithPerRPCCredentials(bearer{t.credentials}))
	}
	return grpc.NewClient("passthrough:///"+to, options...)
}
