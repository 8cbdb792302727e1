package main

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/version"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/webhook"
	"github.com/penstock/penstock/web"
)

// dashboardPool is the pool that pages read through: apart from that of requests, with few
// connections, read only, and with a short timeout of statements.
func dashboardPool(db config.Database) postgres.Config {
	return postgres.Config{
		DSN: db.URL, Pooled: db.Pooled, MaxConns: 4, StatementTimeout: 2 * time.Second, ReadOnly: true,
	}
}

// dashboard serves the pages beside the API. The zero dashboard serves none.
type dashboard struct{ pages *web.Dashboard }

func (l *leader) newDashboard(own *api.API) (dashboard, error) {
	if l.pools.dashboard == nil {
		return dashboard{}, nil
	}
	cfg := l.cfg.Leader
	pages, err := web.New(operator.New(l.pools.dashboard), operator.New(l.pools.api), web.Config{
		Path: cfg.Dashboard.Path, Reserved: api.FirstSegments(), Open: cfg.Open, Token: own.FindToken,
		SessionMax: cfg.Dashboard.Session,
		Examine: func(ctx context.Context) ([]doctor.Finding, error) {
			return doctor.Examine(ctx, l.pools.api, doctor.Config{
				Schema: func(ctx context.Context) (doctor.Finding, error) { return doctor.Schema(ctx, l.pools.api) },
			})
		},
		DisableWebhook: func(ctx context.Context, url string, by invalidation.By) error {
			return webhook.DisableEndpoint(ctx, l.pools.api, url, by)
		},
		TraceURL:  cfg.Dashboard.Trace,
		Timetable: timetable, Version: version.Read().Released(), Log: l.log,
	})
	return dashboard{pages}, err
}

// beside returns a handler that serves the pages below their path and everything else by the API.
// Without a login the pages are for this machine, like the API.
func (d dashboard) beside(own *api.API) http.Handler {
	if d.pages == nil {
		return own
	}
	pages := own.Admitted(d.pages)
	path := d.path()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, path):
			pages.ServeHTTP(w, r)
		case r.URL.Path == strings.TrimSuffix(path, "/") && r.Method == http.MethodGet:
			http.Redirect(w, r, path, http.StatusMovedPermanently)
		default:
			own.ServeHTTP(w, r)
		}
	})
}

// path is where the pages are, empty if there are none.
func (d dashboard) path() string {
	if d.pages == nil {
		return ""
	}
	return d.pages.Path()
}

// drain ends the event streams of browsers.
func (d dashboard) drain() {
	if d.pages != nil {
		d.pages.Drain()
	}
}
