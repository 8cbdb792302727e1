package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// losing is a connection that may be lost without a word: what is written goes nowhere, and nothing comes.
type losing struct {
	net.Conn
	lost *atomic.Bool
}

func (c losing) Write(p []byte) (int, error) {
	if c.lost.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Calls over HTTP/2 share a connection. When it is lost without a word, as where a load balancer has forgotten it, the
// calls on it end, and those behind them get another one.
func TestALostConnectionOfHTTP2IsGivenUp(t *testing.T) {
	t.Parallel()
	idle := httptest.NewTLSServer(nil)
	defer idle.Close() // only its certificate is used
	synctest.Test(t, func(t *testing.T) {
		workers := listenPipes()
		back := &http.Server{ //nolint:gosec // on pipes
			Handler:   http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }),
			TLSConfig: idle.TLS.Clone(), Protocols: new(http.Protocols),
		}
		back.Protocols.SetHTTP2(true)
		var group sync.WaitGroup
		group.Go(func() { _ = back.ServeTLS(workers, "", "") })
		defer group.Wait()
		defer back.Close()
		transport, is := newTransport().other.(*http.Transport)
		if !is {
			t.Fatal("the transport is of another type")
		}
		roots := x509.NewCertPool()
		roots.AddCert(idle.Certificate())
		transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		dials := 0
		var lost atomic.Bool // of the first connection
		transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := workers.dial(ctx, network, address)
			if dials++; dials > 1 {
				return conn, err
			}
			return losing{conn, &lost}, err
		}
		defer transport.CloseIdleConnections()
		send := func() string {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://example.com/", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			answer, err := transport.RoundTrip(request)
			if err != nil {
				return err.Error()
			}
			defer answer.Body.Close()
			text, _ := io.ReadAll(answer.Body)
			return string(text)
		}
		if got := send(); got != "HTTP/2.0" {
			t.Fatalf("got %q", got)
		}
		lost.Store(true)
		began := time.Now()
		if got := send(); got == "HTTP/2.0" || time.Since(began) > 2*keepAlive {
			t.Errorf("a call on the lost connection ends with %q after %s", got, time.Since(began))
		}
		if got := send(); got != "HTTP/2.0" {
			t.Errorf("the call behind it ends with %q", got)
		}
	})
}
