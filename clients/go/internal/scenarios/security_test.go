package scenarios

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

func TestTLSWithACertificateOfTheClient(t *testing.T) {
	t.Parallel()
	ca := testkit.NewAuthority(t)
	own, mine := ca.Server(t, "own"), ca.Client(t, "mine")
	node := testkit.StartNode(t, open, "--tls-cert-file", own.Cert, "--tls-key-file", own.Key,
		"--tls-client-ca-file", ca.File)
	address := "https://" + node.GRPC
	root, certificate := tollgate.WithCAFile(ca.File), tollgate.WithCertificate(mine.Cert, mine.Key)
	client := connect(t, address, root, certificate)
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	// By a name that resolves, and whose certificate is of another name.
	_, port, err := net.SplitHostPort(node.GRPC)
	if err != nil {
		t.Fatal(err)
	}
	named := connect(t, "localhost:"+port, root, certificate, tollgate.WithServerName("127.0.0.1"))
	mustBe(t, ask(t, named, "a", "b").DecidedBy, tollgate.ByNode)
	// Each of these is refused during the handshake, and the fallback decides.
	other := testkit.NewAuthority(t)
	stranger := other.Client(t, "stranger")
	for _, options := range [][]tollgate.Option{
		{root},
		{root, tollgate.WithCertificate(stranger.Cert, stranger.Key)},
		{tollgate.WithCAFile(other.File), certificate},
		{root, certificate, tollgate.WithServerName("node.example")},
	} {
		client := connect(t, address, append(options, tollgate.WithFallback(tollgate.FallbackDeny))...)
		mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByFallback)
	}
	cleartext := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackDeny))
	mustBe(t, ask(t, cleartext, "a", "b").DecidedBy, tollgate.ByFallback)
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
}

func TestACertificateThatIsReplaced(t *testing.T) {
	t.Parallel()
	ca, other := testkit.NewAuthority(t), testkit.NewAuthority(t)
	own, mine, stranger := ca.Server(t, "own"), ca.Client(t, "mine"), other.Client(t, "stranger")
	node := testkit.StartNode(t, open, "--tls-cert-file", own.Cert, "--tls-key-file", own.Key,
		"--tls-client-ca-file", ca.File)
	client := connect(t, "https://"+node.GRPC, tollgate.WithCAFile(ca.File),
		tollgate.WithCertificate(stranger.Cert, stranger.Key), tollgate.WithFallback(tollgate.FallbackDeny))
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByFallback)
	for from, to := range map[string]string{mine.Cert: stranger.Cert, mine.Key: stranger.Key} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	askUntilDecidedBy(t, client, tollgate.ByNode)
}

// newToken returns a new token and its hash.
func newToken(t *testing.T) (token, hash string) {
	t.Helper()
	made, err := exec.Command(testkit.Binary(t), "token").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(made)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "token":
			token = strings.TrimSpace(value)
		case "token_sha256":
			hash = strings.TrimSpace(value)
		}
	}
	return token, hash
}

func TestATokenThatIsReplaced(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	tokenFile, access := filepath.Join(directory, "token"), filepath.Join(directory, "access.yaml")
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	callers := func(hash string) string {
		return fmt.Sprintf("callers: [{ name: a, token_sha256: [%s], namespaces: ['a'] }]", hash)
	}
	first, firstHash := newToken(t)
	second, secondHash := newToken(t)
	write(access, callers(firstHash))
	write(tokenFile, first)
	node := testkit.StartNode(t, open, "--access", access)
	client := connect(t, node.GRPC, tollgate.WithTokenFile(tokenFile), tollgate.WithFallback(tollgate.FallbackDeny))
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	// Without the right there is no decision, but the node is well.
	mustBe(t, ask(t, client, "other", "b").DecidedBy, tollgate.ByFallback)
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	_, err := connect(t, node.GRPC).Allow(context.Background(), "a", "b")
	if err == nil || !strings.HasPrefix(err.Error(), "no decision: Unauthenticated: ") {
		t.Fatal(err)
	}
	// The node takes only the second token now, which the client reads from its file.
	write(access, callers(secondHash))
	askUntilDecidedBy(t, client, tollgate.ByFallback)
	write(tokenFile, second)
	askUntilDecidedBy(t, client, tollgate.ByNode)
}
