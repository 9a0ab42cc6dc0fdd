package connect

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
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

// A file system that hangs delays one call, up to its deadline, and no other.
func TestAFileThatHangs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	write(t, path, "one")
	credentials, err := Load(Files{Token: path}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	// Whoever opens it to read waits for somebody who writes.
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	time.Sleep(tokenInterval)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	for range 2 {
		sent, err := bearer{credentials}.GetRequestMetadata(ctx)
		if err != nil || sent["authorization"] != "Bearer one" {
			t.Fatal(sent, err)
		}
	}
	time.Sleep(tokenInterval)
	// Nor does another call look at it meanwhile.
	if sent, err := (bearer{credentials}).GetRequestMetadata(context.Background()); err != nil || sent["authorization"] != "Bearer one" {
		t.Fatal(sent, err)
	}
	write(t, path, "second")
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
