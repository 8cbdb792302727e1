package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/client"
)

// overNetwork returns a connection to the server that the flags name. The token is never printed.
func (a *app) overNetwork() (conn, error) {
	address, err := url.Parse(a.server)
	if err != nil || (address.Scheme != "http" && address.Scheme != "https") || address.Host == "" ||
		address.User != nil {
		return conn{}, usagef("--server (PENSTOCK_SERVER) wants http://host:port or https://host:port")
	}
	if a.token != "" && a.tokenFile != "" {
		return conn{}, usagef("give --token or --token-file, not both")
	}
	token := a.token
	switch {
	case a.tokenFile != "":
		text, err := os.ReadFile(a.tokenFile)
		if err != nil {
			return conn{}, fmt.Errorf("read token: %w", err)
		}
		token = string(text)
	case token == "":
		token = a.env("PENSTOCK_TOKEN")
	}
	if token = strings.TrimSpace(token); strings.ContainsFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return conn{}, usagef("the token has characters that no token has; it begins with pst_")
	}
	transport, err := a.transport()
	if err != nil {
		return conn{}, err
	}
	return conn{client.New(client.Config{
		URL: a.server, Token: token,
		HTTP: &http.Client{Transport: transport, Timeout: a.timeout},
		// A person waits for the answer: an error that lasts for seconds is reported.
		Tries: 3, WaitMax: 2 * time.Second,
	})}, nil
}

// transport uses the certificates that the flags name, else those of the environment.
func (a *app) transport() (*http.Transport, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:errcheck,forcetypeassert // it is one
	transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if file := cmp.Or(a.caFile, a.env("PENSTOCK_CA_FILE")); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, usagef("--ca-file: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return nil, usagef("--ca-file: %s has no certificate (PEM)", file)
		}
		transport.TLSClientConfig.RootCAs = roots
	}
	cert, key := cmp.Or(a.certFile, a.env("PENSTOCK_CERT_FILE")), cmp.Or(a.keyFile, a.env("PENSTOCK_KEY_FILE"))
	switch {
	case cert == "" && key == "":
		return transport, nil
	case cert == "" || key == "":
		return nil, usagef("--cert-file and --key-file go together")
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, usagef("--cert-file and --key-file: %w", err)
	}
	transport.TLSClientConfig.Certificates = []tls.Certificate{pair}
	return transport, nil
}
