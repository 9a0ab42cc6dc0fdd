package connect

import (
	"strings"
	"testing"
)

func TestValidAddresses(t *testing.T) {
	for _, one := range []struct {
		text, shown, host string
		https             bool
	}{
		{"127.0.0.1:1", "127.0.0.1:1", "127.0.0.1", false},
		{"http://node-1:10990/", "node-1:10990", "node-1", false},
		{"https://localhost:10991", "localhost:10991", "localhost", true},
		{"[::1]:65535", "[::1]:65535", "::1", false},
	} {
		found, err := ParseAddress(one.text)
		if err != nil || found.String() != one.shown || found.host != one.host || found.https != one.https {
			t.Errorf("%s: %v, %v", one.text, found, err)
		}
	}
}

func TestInvalidAddresses(t *testing.T) {
	for _, text := range []string{
		"", "localhost", ":1", "h:", "h:x", "h:65536", "h h:1", "h\r\nX:1", "::1:1", "ftp://h:1",
		"https://", "http://h:1/path", "u@h:1", "[h]:1", "[127.0.0.1]:1", "h:-1", "h:+1",
	} {
		_, err := ParseAddress(text)
		if err == nil || !strings.HasSuffix(err.Error(), "is not a valid address: write HOST:PORT") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestAddressesOfOtherMachines(t *testing.T) {
	for text, remote := range map[string]bool{
		"127.0.0.1:1": false, "127.9.9.9:1": false, "[::1]:1": false, "LocalHost:1": false,
		"http://localhost:1": false, "0.0.0.0:1": false, "[::]:1": false,
		"10.0.0.1:1": true, "[2001:db8::1]:1": true, "node.example:1": true,
		"localhost.example:1": true,
	} {
		found, err := ParseAddress(text)
		if err != nil || found.IsRemote() != remote {
			t.Errorf("%s: %v, %v", text, found, err)
		}
	}
}
