package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/scale"
	"github.com/penstock/penstock/pkg/scale/backend"
	"github.com/penstock/penstock/pkg/scale/keda"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/pkg/worker"
)

// Scale is the section for the backends of the autoscaler.
type Scale struct {
	LocalDir      string `koanf:"local_dir" help:"directory for records and logs of instances that run as processes here; without it backend local has no effect"`
	LocalCommands string `koanf:"local_commands" help:"file of the commands that backend local may run, by the names that deployments use"`
	WebhookKey    string `koanf:"webhook_key" help:"signs orders of backend webhook: env:NAME or file:/path of a whsec_ secret; without it backend webhook has no effect"`
	Kubernetes    bool   `koanf:"kubernetes" help:"the leader runs in a pod and scales objects of its cluster with the pod's token: backend kubernetes"`
	KEDA          string `koanf:"keda_listen" help:"address of the external scaler for KEDA, by gRPC: backend keda; with leader.tls its certificate; beyond this machine it needs that, or leader.insecure_listen"`
}

// backends are those that the configuration allows, by the names that deployments use.
func backends(cfg Leader, log *slog.Logger) (map[string]scale.Backend, error) {
	all := map[string]scale.Backend{}
	if cfg.Scale.LocalDir != "" {
		commands, err := backend.ReadLocalCommands(cfg.Scale.LocalCommands)
		if err != nil {
			return nil, fmt.Errorf("leader.scale.local_commands: %w", err)
		}
		local, err := backend.NewLocal(backend.LocalConfig{
			Dir: cfg.Scale.LocalDir, Commands: commands, Log: log,
		})
		if err != nil {
			return nil, fmt.Errorf("leader.scale.local_dir: %w", err)
		}
		all["local"] = local
	}
	if cfg.Scale.WebhookKey != "" {
		hook, err := webhookBackend(cfg)
		if err != nil {
			return nil, err
		}
		all["webhook"] = hook
	}
	if cfg.Scale.Kubernetes {
		cluster, err := backend.InCluster()
		if err != nil {
			return nil, fmt.Errorf("leader.scale.kubernetes: %w", err)
		}
		cluster.Log = log
		all["kubernetes"] = backend.NewKubernetes(cluster)
	}
	return all, nil
}

// listenKEDA opens the address for KEDA; nil where none is configured.
func listenKEDA(ctx context.Context, cfg Leader) (net.Listener, error) {
	if cfg.Scale.KEDA == "" {
		return nil, nil //nolint:nilnil // as said
	}
	listener, err := httpserver.Listen(ctx, httpserver.Config{
		Address: cfg.Scale.KEDA, ConnsMax: 256,
		TLS: httpserver.TLS(cfg.TLS),
	})
	if err != nil {
		return nil, fmt.Errorf("%w; see leader.scale.keda_listen", err)
	}
	return listener, nil
}

// kedaStreamsMax bounds the requests and streams of one connection at once.
const kedaStreamsMax = 100

// serveKEDA answers KEDA until ctx ends. Every leader does, also one that is not elected: the numbers are rows.
func (l *leader) serveKEDA(ctx context.Context, listener net.Listener) error {
	server := grpc.NewServer(grpc.MaxConcurrentStreams(kedaStreamsMax))
	keda.New(keda.Config{DB: l.pools.keda, Log: l.log}).Register(server)
	stop := context.AfterFunc(ctx, server.Stop)
	defer stop()
	l.log.InfoContext(ctx, "answers KEDA", "listen", listener.Addr().String())
	if err := server.Serve(listener); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serve KEDA: %w", err)
	}
	return nil
}

// webhookBackend calls only addresses that callbacks may have, and signs as callbacks are signed.
func webhookBackend(cfg Leader) (*backend.Webhook, error) {
	text, err := worker.ReadSecret(cfg.Scale.WebhookKey)
	if err != nil {
		return nil, fmt.Errorf("leader.scale.webhook_key: %w", err)
	}
	secret, err := webhook.ParseSecret(text)
	if err != nil {
		return nil, fmt.Errorf("leader.scale.webhook_key: %w", err)
	}
	policy, err := cfg.policy()
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		DialContext: policy.Dialer(net.Dialer{Timeout: 5 * time.Second}), TLSHandshakeTimeout: 5 * time.Second,
		MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute,
	}
	return backend.NewWebhook(backend.WebhookConfig{
		Client: &http.Client{Transport: transport, Timeout: 10 * time.Second},
		Sign: func(id string, at time.Time, body []byte) (http.Header, error) {
			return webhook.Sign(id, at, body, secret)
		},
		Check: policy.Check,
	}), nil
}

// wakeScaler has the autoscaler decide at once when work comes for a model without instances. Without a session
// that can listen it decides once a second.
func wakeScaler(ctx context.Context, db config.Database, scaler *scale.Duty, log *slog.Logger) error {
	conn, err := db.Connect(0).ListenConn()
	if err != nil {
		return err
	}
	if conn == nil {
		<-ctx.Done()
		return nil
	}
	return invalidation.NewListener(invalidation.ListenConfig{
		Conn: conn, Log: log,
		Wake:  func(queue int32, _ *invalidation.Lane) { scaler.WakeQueue(queue) },
		Slots: scaler.WakeModel,
	}).Run(ctx)
}
