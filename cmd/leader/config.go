package main

import (
	"time"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/web"
)

// Config is the configuration of a leader. docs/configuration.md is generated from it.
type Config struct {
	Database config.Database `koanf:"database"`
	Log      config.Log      `koanf:"log"`
	Trace    config.Trace    `koanf:"trace"`
	Leader   Leader          `koanf:"leader"`
}

// Leader is the section of the leader program.
type Leader struct {
	Listen   string           `koanf:"listen" help:"address of the HTTP server; beyond this machine it needs leader.tls, or leader.insecure_listen"`
	Insecure bool             `koanf:"insecure_listen" help:"serve beyond this machine without TLS: only where a proxy or a mesh in front encrypts"`
	Debug    string           `koanf:"debug_listen" help:"address for /metrics, /livez and /readyz, apart from clients; on a loopback address with /debug/pprof as well"`
	TLS      config.TLS       `koanf:"tls"`
	Open     bool             `koanf:"open" help:"let in requests without a token, with every right: for development, on a loopback address alone"`
	Migrate  bool             `koanf:"migrate" help:"apply missing migrations at start, if the role owns the schema; behind a pooler with database.direct_url alone; set it to false where another tool does"`
	Hints    bool             `koanf:"hints" help:"tell nodes by NOTIFY of entries that were put into line; without it they find out by polling"`
	HTTP     HTTP             `koanf:"http"`
	Callback config.Addresses `koanf:"callback"`
	Reports  Reports          `koanf:"inference"`
	Webhook  Webhook          `koanf:"webhook"`
	Election Election         `koanf:"election"`
	Recovery Recovery         `koanf:"recovery"`
	Brake    Brake            `koanf:"brake"`

	Dashboard Dashboard `koanf:"dashboard"`
	Scale     Scale     `koanf:"scale"`
}

// Dashboard is the section for the pages of operators.
type Dashboard struct {
	Enabled bool          `koanf:"enabled" help:"serve the dashboard beside the API; visitors log in with a token of the API, not with leader.open"`
	Path    string        `koanf:"path" help:"where it is served, with a slash at both ends"`
	Session time.Duration `koanf:"session" help:"how long a login lasts; it ends with its token in any case"`
	Trace   string        `koanf:"trace_url" help:"address of a trace in your tracing system, with {trace} in the place of its id, such as https://tempo.example/trace/{trace}; empty: pages name traces without a link"`
}

// HTTP bounds requests and connections of the server.
type HTTP struct {
	Conns           int           `koanf:"connections_max" help:"connections at once, at most; more are refused with 503"`
	ConnsPerAddress int           `koanf:"connections_per_address_max" help:"connections at once from one IPv4 address or IPv6 /64, at most, and requests at once over them; behind a proxy that ends connections all come from its address: set it to connections_max there, and let the proxy count"`
	BodyBytes       int64         `koanf:"body_bytes_max" help:"bytes in the body of a push, at most"`
	Entries         int           `koanf:"entries_max" help:"entries in one push, at most"`
	Timeout         time.Duration `koanf:"timeout" help:"for the work of one request"`
	TokenLifetime   time.Duration `koanf:"token_lifetime" help:"of tokens that are made here without an end; 0: such tokens do not end"`
}

// Reports is the section for reports of asynchronous workers.
type Reports struct {
	CallbackKey string `koanf:"callback_key" help:"signs the addresses at which workers report (/tasks/callback), the same as tasknode.inference.callback_key: env:NAME or file:/path; without it reports are refused"`
}

// Election is the section for the election.
type Election struct {
	Eligible bool          `koanf:"eligible" help:"false: serve requests, but never be elected for singleton duties"`
	Holder   string        `koanf:"holder" help:"what people read about this process; without it host name and process id"`
	Lease    time.Duration `koanf:"lease" help:"how long a term lasts without renewal; equal on all leaders"`
	Poll     time.Duration `koanf:"poll" help:"longest pause between the polls of those that are not elected"`
}

// Recovery is the section for the recovery duties.
type Recovery struct {
	Pause          time.Duration `koanf:"pause" help:"between two passes, for stuck locks and for due entries"`
	Locks          int           `koanf:"pass_locks_max" help:"locks freed in one pass, at most"`
	SuspendShare   float64       `koanf:"suspend_share" help:"nothing is freed while more than this share of the nodes fell silent together"`
	SuspendNodes   int           `koanf:"suspend_nodes_min" help:"and at least so many nodes"`
	NodeRetention  time.Duration `koanf:"node_retention" help:"how long the row of a dead node can be read"`
	AuditRetention time.Duration `koanf:"audit_retention" help:"how long the audit is kept, at least 720h (30 days); 0: for ever"`
}

// defaults are the values of the packages, written out so that --help and the docs can show them.
func defaults() Config {
	return Config{
		Database: config.DatabaseDefault(),
		Log:      config.LogDefault(),
		Trace:    config.TraceDefault(),
		Leader: Leader{
			Listen:  "127.0.0.1:8420",
			Debug:   "127.0.0.1:8422",
			Migrate: true,
			Hints:   true,
			HTTP: HTTP{
				Conns: 8192, ConnsPerAddress: 4096, BodyBytes: 32 << 20, Entries: 10_000,
				Timeout: 10 * time.Second, TokenLifetime: 365 * 24 * time.Hour,
			},
			Dashboard: Dashboard{Enabled: true, Path: "/ui/", Session: 12 * time.Hour},

			Election: Election{Eligible: true, Lease: 4 * time.Second, Poll: 300 * time.Millisecond},
			Recovery: Recovery{
				Pause: 500 * time.Millisecond, Locks: 10_000, SuspendShare: 0.3, SuspendNodes: 3,
				NodeRetention: 10 * time.Minute, AuditRetention: 400 * 24 * time.Hour,
			},
			Brake: Brake{At: 0.95, QueueEntries: 20_000_000},
		},
	}
}

func (c Config) validate() error {
	l := c.Leader
	checks := config.Checks{Section: "leader"}
	checks.Want(!l.Open || config.Loopback(l.Listen), "open", l.Open,
		"it only with leader.listen on a loopback address such as 127.0.0.1:8420")
	checks.Add(config.CheckListen("leader.debug_listen", l.Debug))
	checks.Add(l.TLS.Validate("leader.tls"), config.CheckPlain("leader", l.Listen, l.TLS, l.Insecure))
	checks.Want(l.HTTP.Conns > 0, "http.connections_max", l.HTTP.Conns, "more than 0")
	checks.Want(l.HTTP.BodyBytes > 0, "http.body_bytes_max", l.HTTP.BodyBytes, "more than 0")
	checks.Want(l.HTTP.Entries > 0, "http.entries_max", l.HTTP.Entries, "more than 0")
	checks.Want(l.HTTP.Timeout > 0, "http.timeout", l.HTTP.Timeout, "more than 0")
	checks.Want(l.HTTP.TokenLifetime >= 0, "http.token_lifetime", l.HTTP.TokenLifetime, "0 or more")
	checks.Want(l.Election.Lease >= time.Second, "election.lease", l.Election.Lease, "at least 1s")
	checks.Want(l.Election.Poll > 0, "election.poll", l.Election.Poll, "more than 0")
	checks.Want(l.Recovery.Pause > 0, "recovery.pause", l.Recovery.Pause, "more than 0")
	checks.Want(l.Recovery.Locks > 0, "recovery.pass_locks_max", l.Recovery.Locks, "more than 0")
	checks.Want(l.Recovery.SuspendShare > 0 && l.Recovery.SuspendShare <= 1, "recovery.suspend_share",
		l.Recovery.SuspendShare, "more than 0 and at most 1")
	checks.Want(l.Recovery.SuspendNodes > 0, "recovery.suspend_nodes_min", l.Recovery.SuspendNodes, "more than 0")
	checks.Want(l.Recovery.NodeRetention > 0, "recovery.node_retention", l.Recovery.NodeRetention, "more than 0")
	checks.Want(l.Brake.At > 0.1 && l.Brake.At <= 1, "brake.at", l.Brake.At, "more than 0.1 and at most 1")
	checks.Want(l.Brake.DatabaseBytes >= 0, "brake.database_bytes_max", l.Brake.DatabaseBytes, "0 or more")
	checks.Want(l.Brake.QueueEntries >= 0, "brake.queue_entries_max", l.Brake.QueueEntries, "0 or more")
	keep := l.Recovery.AuditRetention
	checks.Want(keep == 0 || keep >= 30*24*time.Hour, "recovery.audit_retention", keep, "0 or at least 720h")
	checks.Want(web.CheckPath(l.Dashboard.Path, api.FirstSegments()...) == nil, "dashboard.path", l.Dashboard.Path,
		"a path such as /ui/ that no route of the API begins with")
	checks.Want(web.CheckTraceURL(l.Dashboard.Trace) == nil, "dashboard.trace_url", l.Dashboard.Trace,
		"an http or https address that contains {trace}")
	checks.Want(l.Dashboard.Session > 0, "dashboard.session", l.Dashboard.Session, "more than 0")
	checks.Want((l.Scale.LocalDir == "") == (l.Scale.LocalCommands == ""), "scale.local_dir", l.Scale.LocalDir,
		"it together with leader.scale.local_commands")
	checks.Want(l.Scale.KEDA == "" || l.TLS.Cert != "" || l.Insecure || config.Loopback(l.Scale.KEDA),
		"scale.keda_listen", l.Scale.KEDA, "leader.tls as well, or leader.insecure_listen where a mesh encrypts")
	checks.Want(l.HTTP.ConnsPerAddress > 0, "http.connections_per_address_max", l.HTTP.ConnsPerAddress, "more than 0")
	checks.Add(c.Trace.Validate())
	return checks.Err()
}
