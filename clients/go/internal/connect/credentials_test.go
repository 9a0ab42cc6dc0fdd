package connect

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAChangedTokenIsReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	write(t, path, "one\n")
	credentials, err := Load(Files{Token: path}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	mustSend := func(expected string) {
		t.Helper()
		sent, err := bearer{credentials}.GetRequestMetadata(context.Background())
		if err != nil || sent["authorization"] != "Bearer "+expected {
			t.Fatal(sent, err)
		}
	}
	mustSend("one")
	write(t, path, "second\r\n")
	// Until the next look is due.
	time.Sleep(tokenInterval)
	mustSend("second")
	write(t, path, "not a token\n")
	time.Sleep(tokenInterval)
	mustSend("second")
	write(t, path, "third")
	time.Sleep(tokenInterval)
	mustSend("third")
}

func TestUnusableFiles(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "token")
	load := func(files Files) string {
		t.Helper()
		_, err := Load(files, slog.New(slog.DiscardHandler))
		if err == nil {
			t.Fatal("loaded")
		}
		return err.Error()
	}
	if text := load(Files{Token: path}); !strings.HasPrefix(text, "can't read "+path) {
		t.Fatal(text)
	}
	for _, content := range []string{"", "\n", "hunter 2", "hunterä", "hunter2\nhunter3"} {
		write(t, path, content)
		if text := load(Files{Token: path}); !strings.Contains(text, "token: ") || strings.Contains(text, "hunter") {
			t.Fatal(text)
		}
	}
	if text := load(Files{CA: path}); text != path+": no certificates" {
		t.Fatal(text)
	}
	if text := load(Files{CA: directory}); !strings.HasPrefix(text, "can't read "+directory) {
		t.Fatal(text)
	}
}
