package connect

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// tokenInterval is the least time between two looks at the token file.
const tokenInterval = 500 * time.Millisecond

// Files are those of a client, all in PEM but for the token. Empty names mean none.
type Files struct {
	// The certificates that servers' certificates are verified with. Turns on TLS.
	CA string
	// The name that servers' certificates must have, instead of the host name.
	ServerName string
	// The client's certificate and its private key.
	Cert, Key string
	// A file whose only line is the bearer token.
	Token string
}

// Credentials are TLS and the bearer token of a client. The files are read again when they change.
type Credentials struct {
	tls *reloaded[credentials.TransportCredentials]
	// The name that servers' certificates must have; empty for the host name.
	serverName string
	token      *reloaded[map[string]string]
}

// Load reads the files.
func Load(files Files, logger *slog.Logger) (*Credentials, error) {
	if (files.Cert == "") != (files.Key == "") {
		return nil, fmt.Errorf("a certificate and its key belong together")
	}
	if files.CA == "" && (files.Cert != "" || files.ServerName != "") {
		return nil, fmt.Errorf("a certificate or a server name needs the file of the CA certificates")
	}
	c := &Credentials{serverName: files.ServerName}
	if files.CA != "" {
		paths := []string{files.CA}
		if files.Cert != "" {
			paths = append(paths, files.Cert, files.Key)
		}
		c.tls = &reloaded[credentials.TransportCredentials]{
			paths: paths, load: func() (credentials.TransportCredentials, error) { return loadTLS(files) },
			message: "new certificate refused, the old one stays", logger: logger,
		}
		if err := c.tls.init(); err != nil {
			return nil, err
		}
	}
	if files.Token != "" {
		c.token = &reloaded[map[string]string]{
			paths: []string{files.Token}, interval: tokenInterval,
			load:    func() (map[string]string, error) { return loadToken(files.Token) },
			message: "new token refused, the old one stays", logger: logger,
		}
		if err := c.token.init(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func loadTLS(files Files) (credentials.TransportCredentials, error) {
	ca, err := readFile(files.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s: no certificates", files.CA)
	}
	if files.Cert != "" {
		own, err := loadOwn(files)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return credentials.NewTLS(config), nil
}

func loadOwn(files Files) (own tls.Certificate, err error) {
	cert, err := readFile(files.Cert)
	if err != nil {
		return own, err
	}
	key, err := readFile(files.Key)
	if err != nil {
		return own, err
	}
	if own, err = tls.X509KeyPair(cert, key); err != nil {
		return own, fmt.Errorf("%s, %s: %w", files.Cert, files.Key, err)
	}
	return own, nil
}

func loadToken(path string) (map[string]string, error) {
	token, err := readSecret(path)
	if err != nil {
		return nil, err
	}
	isGraphic := func(r rune) bool { return '!' <= r && r <= '~' }
	if strings.IndexFunc(token, func(r rune) bool { return !isGraphic(r) }) >= 0 {
		return nil, fmt.Errorf("%s: a token consists of ASCII characters, without spaces", path)
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// transport returns the credentials of connections.
func (c *Credentials) transport() credentials.TransportCredentials {
	if c.tls == nil {
		return insecure.NewCredentials()
	}
	return transport{c}
}

// transport uses the certificates of the present files for each handshake.
type transport struct{ credentials *Credentials }

func (t transport) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	name := cmp.Or(t.credentials.serverName, authority)
	return t.credentials.tls.get(ctx).ClientHandshake(ctx, name, conn)
}

func (t transport) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("these are the credentials of a client")
}

func (t transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

func (t transport) Clone() credentials.TransportCredentials { return t }

func (t transport) OverrideServerName(string) error {
	return fmt.Errorf("the name of the server is one of the settings")
}

// bearer sends the token with each call.
type bearer struct{ credentials *Credentials }

func (b bearer) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	return b.credentials.token.get(ctx), nil
}

// RequireTransportSecurity is false: a token that would leave the machine in the clear is warned of
// when the client is made.
func (b bearer) RequireTransportSecurity() bool { return false }
