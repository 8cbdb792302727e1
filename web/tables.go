package web

import (
	"context"
	"html/template"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

// limitRow is a limit with how near it is.
type limitRow struct {
	operator.Limit
	Gauge template.HTML
}

type limitsView struct {
	Rows   []limitRow
	Capped bool
}

type pausesView struct {
	Rows   []operator.Pause
	Capped bool
}

type tokensView struct {
	Rows   []operator.APIToken
	Capped bool
}

type webhooksView struct {
	Rows  []operator.Receiver
	After string
	Next  string
}

const (
	tableRows = 100
	limitsMax = 500
	tokensMax = 500
)

func (d *Dashboard) tablePages() {
	d.page(page{
		path: "pauses", nav: "Pauses", section: "Policy", title: "Pauses", template: "pauses", live: true,
		read: func(ctx context.Context, _ query) (any, error) {
			found, err := d.pauses(ctx)
			return pausesView{Rows: found, Capped: len(found) >= pausesMax}, err
		},
	})
	d.page(page{
		path: "limits", nav: "Limits", section: "Policy", title: "Limits", template: "limits", live: true,
		read: func(ctx context.Context, _ query) (any, error) {
			found, err := d.limits(ctx)
			return limitsView{Rows: found, Capped: len(found) >= limitsMax}, err
		},
	})
	d.page(page{
		path: "tokens", nav: "Tokens", section: "System", title: "Tokens", template: "tokens",
		read: func(ctx context.Context, _ query) (any, error) {
			found, err := cached(ctx, d, "tokens", beat,
				func(ctx context.Context) ([]operator.APIToken, error) {
					return d.db.Tokens(ctx, operator.TokenKey{}, tokensMax)
				})
			return tokensView{Rows: found, Capped: len(found) >= tokensMax}, err
		},
	})
	d.page(page{
		path: "webhooks", nav: "Webhooks", section: "System", title: "Webhooks",
		template: "webhooks", read: d.listWebhooks,
	})
}

// limits returns the limits with gauges. Their use is counted from the locks.
func (d *Dashboard) limits(ctx context.Context) ([]limitRow, error) {
	found, err := cached(ctx, d, "limits", 2*time.Second,
		func(ctx context.Context) ([]operator.Limit, error) { return d.db.Limits(ctx, "", limitsMax) })
	if err != nil {
		return nil, err
	}
	rows := make([]limitRow, len(found))
	for i, l := range found {
		rows[i] = limitRow{Limit: l}
		if l.MaxUnits != nil && *l.MaxUnits > 0 {
			rows[i].Gauge = picture.Gauge{
				Title: "units in use of limit " + l.Name, Value: min(1, float64(l.InUse)/float64(*l.MaxUnits)),
			}.HTML()
		}
	}
	return rows, nil
}

func (d *Dashboard) listWebhooks(ctx context.Context, q query) (any, error) {
	v := webhooksView{After: q.Get("after")}
	found, err := cached(ctx, d, keyOf("webhooks", v.After), beat,
		func(ctx context.Context) ([]operator.Receiver, error) {
			return d.db.Receivers(ctx, v.After, tableRows+2)
		})
	if len(found) > 0 && found[0].URL == "" { // the root secret, which is no receiver's
		found = found[1:]
	}
	if len(found) > tableRows {
		found = found[:tableRows]
		v.Next = found[tableRows-1].URL
	}
	v.Rows = found
	return v, err
}
