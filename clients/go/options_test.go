package tollgate

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestSettingsInTheEnvironment(t *testing.T) {
	directory := t.TempDir()
	for name, value := range map[string]string{
		"TOLLGATE_ADDRESS": "a:1, https://b:2,", "TOLLGATE_CA_FILE": filepath.Join(directory, "ca"),
		"TOLLGATE_SERVER_NAME": "nodes", "TOLLGATE_CERT_FILE": "", "TOLLGATE_KEY_FILE": "",
		"TOLLGATE_TOKEN_FILE": "",
	} {
		t.Setenv(name, value)
	}
	if _, err := FromEnv(); err == nil || !strings.HasPrefix(err.Error(), "can't read "+directory+"/ca: ") {
		t.Fatal(err)
	}
	t.Setenv("TOLLGATE_CA_FILE", "")
	mustFail(t, fromEnv, "a certificate or a server name needs the file of the CA certificates")
	t.Setenv("TOLLGATE_SERVER_NAME", "")
	mustFail(t, fromEnv, "https://b:2 needs TLS: name the file of its CA certificates")
	t.Setenv("TOLLGATE_CERT_FILE", "cert")
	mustFail(t, fromEnv, "TOLLGATE_CERT_FILE and TOLLGATE_KEY_FILE belong together")
	t.Setenv("TOLLGATE_CERT_FILE", "")
	t.Setenv("TOLLGATE_ADDRESS", " , ")
	mustFail(t, fromEnv, "no address of a node is given")
	t.Setenv("TOLLGATE_ADDRESS", "127.0.0.1:1")
	client, err := FromEnv()
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
}

func fromEnv() (*Client, error) { return FromEnv() }

func mustFail(t *testing.T, make func() (*Client, error), message string) {
	t.Helper()
	if client, err := make(); err == nil || err.Error() != message {
		t.Fatalf("%v, %v", client, err)
	}
}

func TestSettingsThatMakeNoClient(t *testing.T) {
	for _, one := range []struct {
		addresses []string
		options   []Option
		message   string
	}{
		{nil, nil, "no address of a node is given"},
		{[]string{"a"}, nil, `"a" is not a valid address: write HOST:PORT`},
		{[]string{"https://a:1"}, nil, "https://a:1 needs TLS: name the file of its CA certificates"},
		{[]string{"a:1"}, []Option{WithServerName("b")}, "a certificate or a server name needs the file of the CA certificates"},
		{[]string{"a:1"}, []Option{WithCertificate("b", "")}, "a certificate and its key belong together"},
		{[]string{"a:1"}, []Option{WithTokenFile("/nowhere/token")}, "can't read /nowhere/token: open /nowhere/token: no such file or directory"},
	} {
		mustFail(t, func() (*Client, error) { return New(one.addresses, one.options...) }, one.message)
	}
}
