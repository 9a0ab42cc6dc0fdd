package tollgatehttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/tollgatehttp"
)

// newFake answers each bucket of "web" in a way of its own.
func newFake() *tollgate.Fake {
	fake := tollgate.NewFake(tollgate.FakeGrant())
	fake.Answer("web", "refused", tollgate.FakeRefuse(1500*time.Millisecond))
	fake.Answer("web", "never", tollgate.FakeRefuse(0))
	fake.Answer("web", "later", tollgate.FakeGrantAfter(10*time.Millisecond))
	fake.Answer("web", "invalid", tollgate.FakeInvalid())
	fake.Answer("web", "nobody", tollgate.FakeNoNode())
	return fake
}

// byPath has each path take a token of the bucket of its name; "/free" takes none.
func byPath(r *http.Request) (tollgate.Bucket, bool) {
	name := strings.TrimPrefix(r.URL.Path, "/")
	return tollgate.Bucket{Namespace: "web", Name: name}, name != "free"
}

func TestMiddleware(t *testing.T) {
	fake := newFake()
	handled := ""
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handled = r.URL.Path
		io.WriteString(w, "hello")
	})
	for _, one := range []struct {
		name       string
		options    []tollgate.RequestOption
		status     int
		retryAfter string
		body       string
	}{
		{"granted", nil, 200, "", "hello"},
		{"free", nil, 200, "", "hello"},
		{"refused", nil, 429, "2", "refused: the limit is reached\n"},
		{"never", nil, 429, "", "refused: the limit is reached\n"},
		{"later", nil, 429, "1", "refused: the limit is reached\n"},
		{"later", []tollgate.RequestOption{tollgate.MaxWait(time.Second)}, 200, "", "hello"},
		{"nobody", nil, 503, "", "no decision\n"},
		{"invalid", nil, 400, "", "invalid request: a name is malformed, or the number of tokens or the wait is out of range\n"},
	} {
		client := fake.Client()
		quota := tollgatehttp.Middleware(client, byPath, one.options...)
		handled = ""
		recorder := httptest.NewRecorder()
		quota(handler).ServeHTTP(recorder, httptest.NewRequest("GET", "/"+one.name, nil))
		body, retryAfter := recorder.Body.String(), recorder.Header().Get("Retry-After")
		if recorder.Code != one.status || body != one.body || retryAfter != one.retryAfter {
			t.Errorf("%+v: %d, %q, %q", one, recorder.Code, body, retryAfter)
		}
		if (handled != "") != (one.status == 200) {
			t.Errorf("%+v: handled: %q", one, handled)
		}
		client.Close()
	}
	if asked := fake.Asked("web", "free"); len(asked) != 0 {
		t.Errorf("free, and yet asked for: %v", asked)
	}
}

// closing tells whether a body was closed.
type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error {
	c.closed = true
	return nil
}

func TestTransport(t *testing.T) {
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { requests++ }))
	defer server.Close()
	client := newFake().Client()
	defer client.Close()
	transport := tollgatehttp.Transport(nil, client, byPath)
	post := func(ctx context.Context, name string) (*http.Response, *closing, error) {
		body := &closing{Reader: strings.NewReader("hello")}
		request, err := http.NewRequestWithContext(ctx, "POST", server.URL+"/"+name, body)
		if err != nil {
			t.Fatal(err)
		}
		response, err := (&http.Client{Transport: transport}).Do(request)
		return response, body, err
	}
	for _, name := range []string{"granted", "free"} {
		response, _, err := post(t.Context(), name)
		if err != nil || response.StatusCode != 200 {
			t.Fatal(response, err)
		}
		response.Body.Close()
	}
	response, body, err := post(t.Context(), "refused")
	if err != nil || response.StatusCode != 429 || response.Header.Get("Retry-After") != "2" || !body.closed {
		t.Fatal(response, err)
	}
	if text, err := io.ReadAll(response.Body); err != nil || string(text) != "refused: the limit is reached" {
		t.Fatal(string(text), err)
	}
	if _, body, err := post(t.Context(), "nobody"); !errors.Is(err, tollgate.ErrUnreachable) || !body.closed {
		t.Fatal(err)
	}
	if _, _, err := post(t.Context(), "invalid"); !errors.Is(err, tollgate.ErrInvalid) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := post(ctx, "granted"); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if requests != 2 {
		t.Fatalf("%d requests were made", requests)
	}
}
