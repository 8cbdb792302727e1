package main

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Config is all that can be set about a gateway. docs/configuration.md is made of it.
type Config struct {
	Database config.Database `koanf:"database"`
	Log      config.Log      `koanf:"log"`
	Trace    config.Trace    `koanf:"trace"`
	Gateway  Gateway         `koanf:"gateway"`
}

// Gateway is the section for gateways alone.
type Gateway struct {
	Listen      string           `koanf:"listen" help:"address for clients; others than loopback need TLS"`
	Insecure    bool             `koanf:"insecure_listen" help:"no TLS beyond this machine: a proxy encrypts"`
	Debug       string           `koanf:"debug_listen" help:"address for /metrics, /status, /explain/{request}, /livez and /readyz, apart from clients; on a loopback address with /debug/pprof as well"`
	TLS         config.TLS       `koanf:"tls"`
	Open        bool             `koanf:"open" help:"requests need no token: on a loopback address alone"`
	Name        string           `koanf:"name" help:"name in lists; without it host name and process id"`
	Application string           `koanf:"application" help:"the application that the gateway belongs to"`
	Static      []string         `koanf:"static" help:"models without a database, model=http://host:port and after # the slots (8 if none are given), as in llama=http://gpu-1:8000#16; several for one model are its instances"`
	Snapshot    string           `koanf:"snapshot" help:"file that keeps models, settings and hashes of tokens for starts while the database is away; empty: none"`
	APIURL      string           `koanf:"api_url" help:"address of a leader for clients, for the Location of entries; empty: a path without a host"`
	PublicURL   string           `koanf:"public_url" help:"address of the gateway for clients; empty: each request's"`
	Callback    config.Addresses `koanf:"callback"`
	Secrets     string           `koanf:"secrets" help:"as tasknode.secrets, for headers of models"`
	WebhookKey  string           `koanf:"webhook_key" help:"as tasknode.webhook.key, to show clients the secret of theirs"`
	Lease       time.Duration    `koanf:"lease" help:"how long the gateway may be silent before its slots are freed"`
	Grace       time.Duration    `koanf:"grace" help:"for what is in flight to finish when the gateway stops"`
	Conns       int              `koanf:"connections_max" help:"connections at once, at most; more are refused with 503"`
	PerAddress  int              `koanf:"connections_per_address_max" help:"connections at once from one IPv4 address or IPv6 /64, at most, and requests at once over them; behind a proxy that ends connections all come from its address: set it to connections_max there, and let the proxy count"`
	BodyBytes   int64            `koanf:"body_bytes_max" help:"bytes in the body of a request, at most"`
	AllBytes    int64            `koanf:"bodies_bytes_max" help:"bytes in the bodies of all requests at once"`
	WaitBytes   int64            `koanf:"waiting_bytes_max" help:"bytes in the bodies of all requests that wait, at most"`
	Remember    int              `koanf:"remember" help:"requests that /explain knows, the last ones; 0: none"`
}

// privateNetworks are those of receivers within an organization. Addresses of one link are not among them: services for
// the credentials of machines answer there.
var privateNetworks = []string{
	"10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7",
}

// policy returns the policy for addresses that a prediction may name for its webhook.
func (g Gateway) policy() (webhook.AddressPolicy, error) {
	return webhook.NewPolicy("gateway.callback", webhook.AddressConfig(g.Callback))
}

func defaults() Config {
	return Config{
		Database: config.DatabaseDefault(),
		Log:      config.LogDefault(),
		Trace:    config.TraceDefault(),
		Gateway: Gateway{
			Listen: "127.0.0.1:8430", Debug: "127.0.0.1:8431", Application: "default", Lease: 30 * time.Second,
			Grace: 30 * time.Second, Conns: 16384, PerAddress: 8192, BodyBytes: 32 << 20, AllBytes: 1 << 30,
			WaitBytes: 256 << 20, Remember: 10_000,
			Secrets: worker.SecretsDir, Callback: config.Addresses{AllowNetworks: privateNetworks},
		},
	}
}

// check reports every value that the program cannot start with. A gateway of static models needs no database.
func (c Config) check(getenv func(string) string) error {
	if len(c.Gateway.Static) > 0 {
		return c.validate()
	}
	return errors.Join(c.validate(), c.Database.Given(getenv))
}

func (c Config) validate() error {
	g := c.Gateway
	checks := config.Checks{Section: "gateway"}
	checks.Want(g.Application != "", "application", g.Application, "a name")
	checks.Add(config.CheckListen("gateway.debug_listen", g.Debug))
	checks.Want(g.Lease >= 5*time.Second, "lease", g.Lease, "5 s or more")
	checks.Want(g.Grace >= 0, "grace", g.Grace, "0 or more")
	checks.Want(g.Conns > 0, "connections_max", g.Conns, "more than 0")
	checks.Want(g.PerAddress > 0, "connections_per_address_max", g.PerAddress, "more than 0")
	checks.Want(g.BodyBytes > 0, "body_bytes_max", g.BodyBytes, "more than 0")
	checks.Want(g.AllBytes >= g.BodyBytes, "bodies_bytes_max", g.AllBytes, "body_bytes_max or more")
	checks.Want(g.WaitBytes > 0, "waiting_bytes_max", g.WaitBytes, "more than 0")
	checks.Want(g.Remember >= 0, "remember", g.Remember, "0 or more")
	checks.Want(!g.Open || config.Loopback(g.Listen), "open", g.Open,
		"false, where gateway.listen is not a loopback address")
	_, err := g.models()
	_, wrong := g.policy()
	checks.Add(err, wrong, g.TLS.Validate("gateway.tls"), config.CheckPlain("gateway", g.Listen, g.TLS, g.Insecure),
		c.Trace.Validate())
	return checks.Err()
}

// listener is that of clients.
func (g Gateway) listener() httpserver.Config {
	return httpserver.Config{
		Address: g.Listen, ConnsMax: g.Conns, ConnsPerAddressMax: g.PerAddress,
		TLS: httpserver.TLS(g.TLS),
	}
}

// remember is the option as package gateway reads it.
func (g Gateway) remember() int {
	return cmp.Or(g.Remember, -1) // there 0 means the default
}

// models reads the models that need no database.
func (g Gateway) models() ([]gateway.ModelState, error) {
	byName := map[string]int{}
	var list []gateway.ModelState
	for n, text := range g.Static {
		name, rest, _ := strings.Cut(text, "=")
		address, count, given := strings.Cut(rest, "#")
		slots := 8
		if given {
			var err error
			if slots, err = strconv.Atoi(count); err != nil || slots < 1 {
				return nil, fmt.Errorf("gateway.static: %q is not a number of slots", count)
			}
		}
		if name == "" || !strings.HasPrefix(address, "http") {
			return nil, fmt.Errorf("gateway.static: %q is not model=http://host:port#slots", text)
		}
		at, known := byName[name]
		if !known {
			at = len(list)
			byName[name] = at
			list = append(list, gateway.ModelState{
				Name: name, Remote: name, Protocol: worker.ProtocolOpenAI, RunMax: 10 * time.Minute,
				// Nothing shows when a run has ended that goes on: a slot that was held for it would not come back.
				AbortStops: new(true),
				Policy:     gateway.DefaultPolicy(), Created: time.Now(),
			})
		}
		list[at].Instances = append(list[at].Instances, gateway.InstanceState{
			ID: int32(n) + 1, Server: address, Address: address, Slots: slots, Usable: true, //nolint:gosec // a few
		})
	}
	return list, nil
}
