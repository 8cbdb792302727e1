package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// certificates writes an authority, and certificates of a server and a client that it has signed.
func certificates(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	var ca *x509.Certificate
	var caKey *ecdsa.PrivateKey
	for i, name := range []string{"ca", "server", "client"} {
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: i == 0, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			ca, caKey = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), caKey)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		for ending, block := range map[string]*pem.Block{".crt": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "PRIVATE KEY", Bytes: private}} {
			if err := os.WriteFile(filepath.Join(dir, name+ending), pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func TestCommandsGoThroughMutualTLS(t *testing.T) {
	pool, dir := pgtest.New(t), certificates(t)
	file := func(name string) string { return filepath.Join(dir, name) }
	secret, err := operator.New(pool).CreateToken(t.Context(), operator.Grant{Name: "ops", Scopes: []string{"admin"}}, invalidation.By{Actor: "test", Reason: "test"})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := httpserver.Listen(t.Context(), httpserver.Config{Address: "127.0.0.1:0", TLS: httpserver.TLS{Cert: file("server.crt"), Key: file("server.key"), ClientCA: file("ca.crt")}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- httpserver.Serve(ctx, listener, api.New(pool, api.Config{}), slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	server := "https://" + listener.Addr().String()
	stranger := certificates(t)
	play := func(env map[string]string, args ...string) (int, string) {
		env["PENSTOCK_SERVER"], env["PENSTOCK_TOKEN"] = server, secret
		var out, errs bytes.Buffer
		a := newApp(strings.NewReader(""), &out, &errs, func(name string) string { return env[name] })
		code := run(t.Context(), a, args)
		return code, out.String() + errs.String()
	}
	all := []string{"--ca-file", file("ca.crt"), "--cert-file", file("client.crt"), "--key-file", file("client.key")}
	for _, c := range []struct {
		name string
		args []string
		env  map[string]string
		code int
		says string
	}{
		{"flags", append([]string{"queue", "list"}, all...), nil, 0, "webhook"},
		{"environment", []string{"queue", "list"}, map[string]string{"PENSTOCK_CA_FILE": file("ca.crt"), "PENSTOCK_CERT_FILE": file("client.crt"), "PENSTOCK_KEY_FILE": file("client.key")}, 0, "webhook"},
		{"a change", append([]string{"queue", "pause", "webhook", "--reason", "test"}, all...), nil, 0, ""},
		{"authority not known", []string{"queue", "list"}, nil, 6, "certificate"},
		// By TLS 1.3 a client learns of it after the handshake, and the connection may be gone before the word has come.
		{"no certificate of ours", append([]string{"queue", "list"}, all[:2]...), nil, 6, ""},
		{"certificate of somebody else", append([]string{"queue", "list"}, all[0], all[1], "--cert-file", filepath.Join(stranger, "client.crt"), "--key-file", filepath.Join(stranger, "client.key")), nil, 6, ""},
		{"certificate without its key", append([]string{"queue", "list"}, all[:4]...), nil, 2, "go together"},
		{"no such file", []string{"queue", "list", "--ca-file", file("none.crt")}, nil, 2, "--ca-file"},
		{"no certificate in it", []string{"queue", "list", "--ca-file", file("ca.key")}, nil, 2, "no certificate"},
	} {
		env := map[string]string{}
		for name, value := range c.env {
			env[name] = value
		}
		code, said := play(env, c.args...)
		if code != c.code || !strings.Contains(said, c.says) {
			t.Errorf("%s: exit code %d, want %d; it said %s", c.name, code, c.code, said)
		}
	}
	var paused int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.audit WHERE actor = 'ops' AND verb = 'pause_queue'`).Scan(&paused); err != nil || paused != 1 {
		t.Errorf("%d pauses are in the audit (%v)", paused, err)
	}
}

// A failed connection has several causes, each with another next step.
func TestTheNextStepIsThatOfTheCause(t *testing.T) {
	for want, err := range map[string]error{
		"--ca-file": &url.Error{Op: "Get", Err: &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}},
		"certificate names": &url.Error{Op: "Get", Err: &tls.CertificateVerificationError{Err: x509.HostnameError{
			Certificate: &x509.Certificate{DNSNames: []string{"leader"}}, Host: "127.0.0.1",
		}}},
		"NO_PROXY": &url.Error{Op: "Get", Err: &net.OpError{Op: "proxyconnect", Net: "tcp", Err: net.ErrClosed}},
		"--server": &url.Error{Op: "Get", Err: &net.OpError{Op: "dial", Net: "tcp", Err: net.ErrClosed}},
		"primary":  &pgconn.PgError{Code: "25006"},
	} {
		if code, next := kindOf(err); code != exitUnavailable || !strings.Contains(next, want) {
			t.Errorf("%v: exit %d, %q; want %q", err, code, next, want)
		}
	}
}
