package httpserver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/httpserver"
)

// authority signs certificates for tests.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	dir  string
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert = &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.file, _ = a.sign("ca", a.cert)
	return a
}

// sign writes a certificate and its key, signed by the authority, or by itself if that is being made.
func (a *authority) sign(name string, cert *x509.Certificate) (certFile, keyFile string) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if a.key == nil {
		a.key = key
	}
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func (a *authority) server(name string) (certFile, keyFile string) {
	return a.sign("server", &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// serve starts a server that says hello, and returns its address.
func serve(t *testing.T, cfg httpserver.Config) string {
	t.Helper()
	return serveHandler(t, cfg, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
}

func serveHandler(t *testing.T, cfg httpserver.Config, handler http.HandlerFunc) string {
	t.Helper()
	cfg.Address = "127.0.0.1:0"
	listener, err := httpserver.Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- httpserver.Serve(ctx, listener, handler, slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("server ended: %v", err)
		}
	})
	return listener.Addr().String()
}

// get returns the certificate's name and the protocol.
func get(t *testing.T, address string, roots *x509.CertPool, own ...tls.Certificate) (name, protocol string, err error) {
	t.Helper()
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: own, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}}
	r, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+address, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(r)
	if err != nil {
		return "", "", err
	}
	defer response.Body.Close()
	return response.TLS.PeerCertificates[0].Subject.CommonName, response.Proto, nil
}

func TestServerTakesUpANewCertificateAndSpeaksHTTP2(t *testing.T) {
	ca := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(parsed(t, ca.file))
	certFile, keyFile := ca.server("first")
	address := serve(t, httpserver.Config{TLS: httpserver.TLS{Cert: certFile, Key: keyFile}})
	if name, protocol, err := get(t, address, roots); err != nil || name != "first" || protocol != "HTTP/2.0" {
		t.Errorf("got %q by %s (%v)", name, protocol, err)
	}
	ca.server("second")
	later := time.Now().Add(time.Minute)
	if err := os.Chtimes(certFile, later, later); err != nil { // the clock of some file systems is coarse
		t.Fatal(err)
	}
	if name, _, err := get(t, address, roots); err != nil || name != "second" {
		t.Errorf("after the change got %q (%v)", name, err)
	}
	if err := os.Remove(certFile); err != nil {
		t.Fatal(err)
	}
	if name, _, err := get(t, address, roots); err != nil || name != "second" {
		t.Errorf("while the file is away got %q (%v)", name, err)
	}
}

func TestMutualTLSLetsInOnlyWhoHasACertificate(t *testing.T) {
	ca := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(parsed(t, ca.file))
	certFile, keyFile := ca.server("server")
	address := serve(t, httpserver.Config{TLS: httpserver.TLS{Cert: certFile, Key: keyFile, ClientCA: ca.file}})
	client := func(by *authority) tls.Certificate {
		cert, key := by.sign("client", &x509.Certificate{SerialNumber: big.NewInt(3), Subject: pkix.Name{CommonName: "c"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		return pair
	}
	if _, _, err := get(t, address, roots, client(ca)); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	if _, _, err := get(t, address, roots); err == nil {
		t.Error("without a certificate the server answers")
	}
	if _, _, err := get(t, address, roots, client(newAuthority(t))); err == nil {
		t.Error("with a certificate of somebody else the server answers")
	}
	if _, err := httpserver.Listen(t.Context(), httpserver.Config{Address: "127.0.0.1:0", TLS: httpserver.TLS{ClientCA: ca.file}}); err == nil {
		t.Error("certificates of clients are asked for without TLS")
	}
}

func parsed(t *testing.T, file string) *x509.Certificate {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestConnectionsBeyondTheBoundAreToldSo(t *testing.T) {
	address := serve(t, httpserver.Config{ConnsMax: 2})
	dial := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	answer := func(conn net.Conn) string {
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		text := make([]byte, 1024)
		n, _ := conn.Read(text)
		return string(text[:n])
	}
	first, second := dial(), dial()
	if !strings.Contains(answer(first), "hello") || !strings.Contains(answer(second), "hello") {
		t.Fatal("connections within the bound get no answer")
	}
	if got := answer(dial()); !strings.HasPrefix(got, "HTTP/1.1 503 ") || !strings.Contains(got, "Retry-After: 1") || !strings.Contains(got, "too many connections") {
		t.Errorf("a third connection is answered %q", got)
	}
	first.Close()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(answer(dial()), "hello"); { // the server hears of it in time
		if time.Now().After(deadline) {
			t.Fatal("the third gets no answer although one has gone")
		}
	}
}

func TestOneAddressDoesNotTakeThePlacesOfOthers(t *testing.T) {
	address := serve(t, httpserver.Config{ConnsMax: 10, ConnsPerAddressMax: 2})
	from := func(own string) (net.Conn, string) {
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(own)}}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		text := make([]byte, 1024)
		n, _ := conn.Read(text)
		return conn, string(text[:n])
	}
	first, _ := from("127.0.0.1")
	from("127.0.0.1")
	if _, got := from("127.0.0.1"); !strings.HasPrefix(got, "HTTP/1.1 503 ") {
		t.Errorf("a third connection of one address is answered %q", got)
	}
	if _, got := from("127.0.0.2"); !strings.Contains(got, "hello") {
		t.Errorf("one of another address is answered %q", got)
	}
	first.Close()
	for deadline := time.Now().Add(time.Minute); ; {
		if _, got := from("127.0.0.1"); strings.Contains(got, "hello") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the address gets no answer although one of its connections has gone")
		}
	}
}

// One connection of HTTP/2 carries as many requests as its client likes.
func TestRequestsOfOneAddressAreBoundedOverOneConnection(t *testing.T) {
	ca := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(parsed(t, ca.file))
	certFile, keyFile := ca.server("leader")
	began, end := make(chan bool), make(chan bool)
	address := serveHandler(t, httpserver.Config{TLS: httpserver.TLS{Cert: certFile, Key: keyFile}, ConnsPerAddressMax: 2}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			began <- true
			<-end
		}
		_, _ = io.WriteString(w, r.Proto)
	})
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true}}
	ask := func(path string) (int, string, http.Header) {
		r, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+address+path, nil)
		response, err := client.Do(r)
		if err != nil {
			t.Error(err)
			return 0, "", nil
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return response.StatusCode, string(text), response.Header
	}
	if _, text, _ := ask("/"); text != "HTTP/2.0" {
		t.Fatalf("the server speaks %q", text)
	}
	done := make(chan int, 2)
	for range 2 {
		go func() { status, _, _ := ask("/slow"); done <- status }()
		<-began
	}
	if status, text, header := ask("/"); status != 429 || !strings.Contains(text, `"too_many_requests"`) || header.Get("Retry-After") != "1" {
		t.Errorf("a third request at once is answered %d %s", status, text)
	}
	close(end)
	for range 2 {
		if status := <-done; status != 200 {
			t.Errorf("one of the first two is answered %d", status)
		}
	}
	if status, text, _ := ask("/"); status != 200 {
		t.Errorf("when they are over: %d %s", status, text)
	}
}

func TestDebugServerHasMetricsAndProfiles(t *testing.T) {
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "up 1") })
	local, open := httpserver.ForOperators(http.NewServeMux(), metrics, true), httpserver.ForOperators(http.NewServeMux(), metrics, false)
	for path, want := range map[string][2]int{
		"/metrics": {200, 200}, "/debug/pprof/": {200, 404}, "/debug/pprof/goroutine?debug=1": {200, 404},
		"/debug/pprof/cmdline": {404, 404}, "/v1/queues": {404, 404},
	} {
		if got := [2]int{statusOf(t, local, path), statusOf(t, open, path)}; got != want {
			t.Errorf("%s: %d on loopback and %d elsewhere, want %d", path, got[0], got[1], want)
		}
	}
}

func statusOf(t *testing.T, handler http.Handler, path string) int {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "http://127.0.0.1"+path, nil))
	return w.Code
}
