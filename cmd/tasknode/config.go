package main

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/tasknode"
	"github.com/penstock/penstock/pkg/worker"
)

// Config is all that can be set about a task node. docs/configuration.md is made of it.
type Config struct {
	Database config.Database `koanf:"database"`
	Log      config.Log      `koanf:"log"`
	Trace    config.Trace    `koanf:"trace"`
	TaskNode TaskNode        `koanf:"tasknode"`
}

// TaskNode is the section for task nodes alone.
type TaskNode struct {
	Listen            string        `koanf:"listen" help:"address of the HTTP server with /livez, /readyz, /metrics and, with inference.callback_key, the reports of workers"`
	Insecure          bool          `koanf:"insecure_listen" help:"take reports of workers beyond this machine without TLS: only where a proxy or a mesh in front encrypts"`
	TLS               config.TLS    `koanf:"tls"`
	ConnsMax          int           `koanf:"connections_max" help:"connections at once, at most; more are refused with 503"`
	PerAddress        int           `koanf:"connections_per_address_max" help:"connections at once from one IPv4 address or IPv6 /64, at most, and requests at once over them; behind a proxy that ends connections all come from its address: set it to connections_max there, and let the proxy count"`
	Name              string        `koanf:"name" help:"what people read about this node; without it host name and process id"`
	Application       string        `koanf:"application" help:"the application whose queues the node serves, and no others"`
	Threads           int           `koanf:"threads" help:"processing threads; 0: 16 for each CPU, or as many as the slots of the models that the node serves, up to 4096"`
	SchedulingThreads int           `koanf:"scheduling_threads" help:"threads that claim"`
	Lease             time.Duration `koanf:"lease" help:"how long the node may be silent before others run its entries"`
	Beat              time.Duration `koanf:"beat" help:"between heartbeats"`
	Poll              time.Duration `koanf:"poll" help:"between polls for work while nothing hints at any"`
	Grace             time.Duration `koanf:"grace" help:"for what runs to finish when the node stops; 0: none"`
	Hints             bool          `koanf:"hints" help:"listen for hints by NOTIFY; without it the node finds work by polling"`
	Governor          bool          `koanf:"governor" help:"take no more than CPU and memory of the machine or container allow"`
	MemoryHigh        float64       `koanf:"memory_high" help:"share of the memory above which the governor takes no entries, until use has been below memory_low for 3 s"`
	MemoryLow         float64       `koanf:"memory_low" help:"share of the memory that declared needs may add up to"`
	CPUHigh           float64       `koanf:"cpu_high" help:"share of the cores, beyond declared needs, above which the governor takes no entries with a need of CPU, until use has been below cpu_low for 3 s"`
	CPULow            float64       `koanf:"cpu_low" help:"see cpu_high"`
	CPUGateAll        bool          `koanf:"cpu_gate_all" help:"let cpu_high keep back entries without a need of CPU as well; those of models wait for other machines"`
	Needs             []string      `koanf:"needs" help:"what an entry of a queue uses while it runs on this node, queue=cores/MiB, as in thumbs=0.5/256, in place of the queue's setting needs; the governor takes no more than fit"`
	Secrets           string        `koanf:"secrets" help:"directory of the files that settings in the database may refer to as file:/path (headers of models, secrets of receivers); as env:NAME they may refer to variables that begin with PENSTOCK_SECRET_"`
	Webhook           Webhook       `koanf:"webhook"`
	Inference         Inference     `koanf:"inference"`
}

// Inference says how workers reach this node, and where large results go.
type Inference struct {
	CallbackURL string `koanf:"callback_url" help:"where asynchronous workers reach a leader, or this listener or that of any node, to report (/tasks/callback/{id}): http://host:port; without it Cog models cannot be run so, and others are polled alone"`
	CallbackKey string `koanf:"callback_key" help:"what keeps others from guessing those addresses, the same for all nodes, and leaders (leader.inference.callback_key): env:NAME or file:/path"`
	Objects     string `koanf:"objects" help:"where results beyond 64 KiB go: a directory that all nodes mount, or s3://bucket/prefix, from which Penstock deletes nothing; without it they stay in the database"`
	S3Endpoint  string `koanf:"s3_endpoint" help:"server of that bucket: https://host:port"`
	S3Region    string `koanf:"s3_region" help:"region of that bucket, where its server cares; us-east-1 if empty"`
	S3AccessKey string `koanf:"s3_access_key" help:"key id for it: env:NAME or file:/path"`
	S3SecretKey string `koanf:"s3_secret_key" help:"secret key for it: env:NAME or file:/path"`
}

// Webhook says where callbacks may go, and how they are signed.
type Webhook struct {
	Key     string `koanf:"key" help:"what seals the secrets of receivers in the database, 16 bytes or more, the same for all nodes: env:NAME or file:/path; without it no callback can be signed, and they wait"`
	Issuer  string `koanf:"issuer" help:"name of this installation in the bodies of callbacks; without it a fingerprint of its public key"`
	Threads int    `koanf:"threads" help:"processing threads that deliver callbacks at once, at most; half of them are kept for receivers that answer promptly; 0: a quarter of all"`

	config.Addresses `koanf:",squash"`
}

func defaults() Config {
	return Config{
		Database: config.DatabaseDefault(),
		Log:      config.LogDefault(),
		Trace:    config.TraceDefault(),
		TaskNode: TaskNode{
			Listen: "127.0.0.1:8421", ConnsMax: 1024, PerAddress: 512, Application: "default",
			SchedulingThreads: 2, Lease: 10 * time.Second, Beat: 2 * time.Second,
			Poll: 250 * time.Millisecond, Grace: 30 * time.Second,
			Hints: true, Governor: true, MemoryHigh: 0.90, MemoryLow: 0.80, CPUHigh: 0.90, CPULow: 0.75,
			Secrets: worker.SecretsDir,
		},
	}
}

func (c Config) validate() error {
	t := c.TaskNode
	checks := config.Checks{Section: "tasknode"}
	checks.Want(t.Application != "", "application", t.Application, "a name")
	checks.Want(t.Threads >= 0, "threads", t.Threads, "0 or more")
	checks.Want(t.SchedulingThreads > 0, "scheduling_threads", t.SchedulingThreads, "more than 0")
	checks.Want(t.Beat > 0, "beat", t.Beat, "more than 0")
	checks.Want(t.Lease >= tasknode.LeaseMin(t.Beat), "lease", t.Lease, "at least three beats")
	checks.Want(t.Poll > 0, "poll", t.Poll, "more than 0")
	checks.Want(t.Grace >= 0, "grace", t.Grace, "0 or more")
	checks.Want(t.Webhook.Threads >= 0, "webhook.threads", t.Webhook.Threads, "0 or more")
	checks.Want(t.ConnsMax > 0, "connections_max", t.ConnsMax, "more than 0")
	checks.Want(t.PerAddress > 0, "connections_per_address_max", t.PerAddress, "more than 0")
	checks.Add(t.TLS.Validate("tasknode.tls"))
	if t.Inference.CallbackURL != "" {
		checks.Add(config.CheckPlain("tasknode", t.Listen, t.TLS, t.Insecure))
	}
	_, err := t.needs()
	checks.Add(err, t.marks().Validate(), c.Trace.Validate())
	return checks.Err()
}

// grace is the option as package tasknode reads it.
func (t TaskNode) grace() time.Duration {
	return cmp.Or(t.Grace, -1) // there 0 means the default
}

// marks are the governor's.
func (t TaskNode) marks() governor.Config {
	return governor.Config{
		MemoryHigh: t.MemoryHigh, MemoryLow: t.MemoryLow, CPUHigh: t.CPUHigh, CPULow: t.CPULow,
		RefuseUndeclared: t.CPUGateAll,
	}
}

// mibMax is how much memory an entry may need at most, as the setting needs of queues.
const mibMax = 1e9

// needs reads what entries are declared to use.
func (t TaskNode) needs() (map[string]governor.Need, error) {
	needs := map[string]governor.Need{}
	for _, text := range t.Needs {
		queue, amounts, _ := strings.Cut(text, "=")
		cores, mebibytes, _ := strings.Cut(amounts, "/")
		cpu, err := strconv.ParseFloat(cores, 64)
		mib, err2 := strconv.ParseFloat(mebibytes, 64)
		valid := cpu >= 0 && cpu <= governor.CPUMost && mib >= 0 && mib <= mibMax // NaN is not
		if queue == "" || err != nil || err2 != nil || !valid {
			return nil, fmt.Errorf("tasknode.needs: %q is not queue=cores/MiB, as in thumbs=0.5/256, "+
				"of up to %.0f cores and %.0f MiB", text, governor.CPUMost, mibMax)
		}
		needs[queue] = governor.Need{CPU: cpu, MemoryBytes: int64(mib * (1 << 20))}
	}
	return needs, nil
}
