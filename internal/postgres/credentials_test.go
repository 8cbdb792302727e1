package postgres_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/penstock/penstock/internal/postgres"
)

// generation is what an installation has at a time: an authority, a certificate of the server and one of the client,
// both signed by it, and a password.
type generation struct {
	name      string
	authority []byte // PEM
	server    tls.Certificate
	certPEM   []byte // of the client
	keyPEM    []byte
}

func newGeneration(t *testing.T, name string) generation {
	t.Helper()
	sign := func(cn string, by *x509.Certificate, key *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: cn}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: by == nil, BasicConstraintsValid: true,
		}
		if by == nil {
			by, key = c, own
		}
		der, err := x509.CreateCertificate(rand.Reader, c, by, own.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		c.Raw = der
		return c, own
	}
	block := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	ca, caKey := sign("authority "+name, nil, nil)
	server, serverKey := sign("server "+name, ca, caKey)
	client, clientKey := sign("client "+name, ca, caKey)
	der, err := x509.MarshalECPrivateKey(clientKey)
	if err != nil {
		t.Fatal(err)
	}
	return generation{
		name: name, authority: block("CERTIFICATE", ca.Raw),
		server:  tls.Certificate{Certificate: [][]byte{server.Raw}, PrivateKey: serverKey},
		certPEM: block("CERTIFICATE", client.Raw), keyPEM: block("EC PRIVATE KEY", der),
	}
}

// write replaces the files that the address names.
func (g generation) write(t *testing.T, dir string) {
	t.Helper()
	for name, text := range map[string][]byte{
		"ca": g.authority, "cert": g.certPEM, "key": g.keyPEM, "pass": []byte("*:*:*:*:password " + g.name),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// login serves one connection as far as the password, and returns the client's certificate and password.
func login(listener net.Listener, g generation) (string, error) {
	conn, err := listener.Accept()
	if err != nil {
		return "", err
	}
	defer conn.Close()
	plain := pgproto3.NewBackend(conn, conn)
	if _, err := plain.ReceiveStartupMessage(); err != nil { // asks for TLS
		return "", err
	}
	if _, err := conn.Write([]byte("S")); err != nil {
		return "", err
	}
	secure := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{g.server}, ClientAuth: tls.RequireAnyClientCert})
	backend := pgproto3.NewBackend(secure, secure)
	if _, err := backend.ReceiveStartupMessage(); err != nil {
		return "", err
	}
	password, err := askForPassword(backend)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s, %s", secure.ConnectionState().PeerCertificates[0].Subject.CommonName, password), nil
}

// askForPassword returns the password that the client sends, and refuses the connection.
func askForPassword(backend *pgproto3.Backend) (string, error) {
	backend.Send(&pgproto3.AuthenticationCleartextPassword{})
	if err := backend.Flush(); err != nil {
		return "", err
	}
	if err := backend.SetAuthType(pgproto3.AuthTypeCleartextPassword); err != nil {
		return "", err
	}
	message, err := backend.Receive()
	if err != nil {
		return "", err
	}
	sent, _ := message.(*pgproto3.PasswordMessage)
	backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03", Message: "not now"})
	return sent.Password, backend.Flush()
}

// Certificates of a day, and passwords that are rotated, are replaced in their files while programs run.
func TestEachConnectionReadsTheFilesOfItsAddress(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	dir := t.TempDir()
	first, second := newGeneration(t, "1"), newGeneration(t, "2")
	first.write(t, dir)
	dsn := fmt.Sprintf("postgres://u@%s/d?sslmode=verify-full&sslrootcert=%s/ca&sslcert=%[2]s/cert&sslkey=%[2]s/key&passfile=%[2]s/pass",
		listener.Addr(), dir)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	alone, err := postgres.ConnConfig(postgres.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	for _, now := range []generation{first, second} {
		now.write(t, dir)
		for name, connect := range map[string]func(context.Context) error{
			"pool":         func(ctx context.Context) error { return pool.Ping(ctx) },
			"of one's own": func(ctx context.Context) error { _, err := postgres.Connect(ctx, alone); return err },
		} {
			ended := make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { ended <- connect(ctx) }()
			seen, err := login(listener, now)
			cancel()
			if want := "client " + now.name + ", password " + now.name; err != nil || seen != want {
				t.Errorf("connection %s: the server sees %q, want %q (%v)", name, seen, want, err)
			}
			if err := <-ended; !postgres.Unavailable(err) {
				t.Errorf("connection %s ended with %v", name, err)
			}
		}
	}
	if err := os.Remove(filepath.Join(dir, "key")); err != nil {
		t.Fatal(err)
	}
	if err := pool.Ping(t.Context()); !postgres.Unavailable(err) {
		t.Errorf("without the key: %v, want an error that passes", err)
	}
}

// A service file that names another user has the password of that one: it is no use to the user of the connections.
func TestAConnectionDoesNotSendThePasswordOfAnotherUser(t *testing.T) {
	service := filepath.Join(t.TempDir(), "service")
	write := func(lines ...string) {
		if err := os.WriteFile(service, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	write("[s]", "user=blue", "password=first")
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dsn := fmt.Sprintf("host=127.0.0.1 port=%s dbname=d sslmode=disable service=s servicefile=%s", port, service)
	cc, err := postgres.ConnConfig(postgres.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	for want, lines := range map[string][]string{
		"second": {"[s]", "user=blue", "password=second"}, "first": {"[s]", "user=green", "password=other"},
	} {
		write(lines...)
		ended := make(chan struct{})
		go func() { _, _ = postgres.Connect(t.Context(), cc); close(ended) }() // it fails: the server goes away
		conn, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		backend := pgproto3.NewBackend(conn, conn)
		if _, err := backend.ReceiveStartupMessage(); err != nil {
			t.Fatal(err)
		}
		sent, err := askForPassword(backend)
		if err != nil || sent != want {
			t.Errorf("%v: the password sent is %q, want %q (%v)", lines, sent, want, err)
		}
		conn.Close()
		<-ended
	}
}
