package httpserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// Config says where a server listens, and which clients it lets connect.
type Config struct {
	Address string
	// ConnsMax bounds the connections at once; more are refused with 503. Default 8,192.
	ConnsMax int
	// ConnsPerAddressMax bounds those of one IPv4 address or IPv6 /64. Default: ConnsMax.
	ConnsPerAddressMax int
	TLS                TLS
}

// TLS names the files of certificates. The zero value means plain HTTP.
type TLS struct {
	Cert, Key string // they are read again when they have changed
	ClientCA  string // clients need a certificate that one of these signed, and their token as well
}

// Listen opens the listener.
func Listen(ctx context.Context, cfg Config) (net.Listener, error) {
	secure, err := cfg.TLS.config()
	if err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	cfg.ConnsMax = cmp.Or(cfg.ConnsMax, 8192)
	listener = bound(listener, cfg.ConnsMax, cmp.Or(cfg.ConnsPerAddressMax, cfg.ConnsMax), secure != nil)
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	return listener, nil
}

// config returns nil where there is to be none.
func (t TLS) config() (*tls.Config, error) {
	if t.Cert == "" && t.Key == "" {
		if t.ClientCA != "" {
			return nil, errors.New("listen: certificates of clients can be asked for only with a certificate of the " +
				"server's own")
		}
		return nil, nil //nolint:nilnil // no TLS is an answer
	}
	own := &certificate{certFile: t.Cert, keyFile: t.Key}
	if _, err := own.get(nil); err != nil {
		return nil, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: own.get, NextProtos: []string{"h2", "http/1.1"}}
	if t.ClientCA == "" {
		return cfg, nil
	}
	authorities, err := os.ReadFile(t.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("read certificates of authorities: %w", err)
	}
	cfg.ClientCAs, cfg.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !cfg.ClientCAs.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("read certificates of authorities: %s has none", t.ClientCA)
	}
	return cfg, nil
}

// certificate is read again when its file has changed.
type certificate struct {
	certFile, keyFile string

	mu      sync.Mutex
	changed time.Time
	pair    *tls.Certificate
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	file, err := os.Stat(c.certFile)
	if err == nil && c.pair != nil && file.ModTime().Equal(c.changed) {
		return c.pair, nil
	}
	var pair tls.Certificate
	if err == nil {
		pair, err = tls.LoadX509KeyPair(c.certFile, c.keyFile)
	}
	switch {
	case err == nil:
		c.pair, c.changed = &pair, file.ModTime()
	case c.pair == nil:
		return nil, fmt.Errorf("read certificate: %w", err)
	}
	return c.pair, nil // while both files are being replaced, the old one
}
