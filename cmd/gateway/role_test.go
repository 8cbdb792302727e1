package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/slot"
)

// withRole returns the site as a process sees it that has the rights of a duty and no others.
func (s *site) withRole(duty string) *site {
	s.Helper()
	prefix := fmt.Sprintf("t%d", time.Now().UnixNano())
	config := s.pool.Config().ConnConfig.Copy()
	roles := migrations.Roles(prefix)
	if _, err := migrations.Grant(s.Context(), config, roles); err != nil {
		s.Fatal(err)
	}
	role := ""
	for _, r := range roles {
		if r.Duty == duty {
			role = r.Name
		}
		s.Cleanup(func() { s.dropRole(r.Name) })
	}
	address, err := url.Parse(s.dsn)
	if err != nil {
		s.Fatal(err)
	}
	query := address.Query()
	query.Set("options", "-c role="+role)
	address.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	other := *s
	other.dsn = address.String()
	return &other
}

func (s *site) dropRole(name string) {
	ctx := context.WithoutCancel(s.Context())
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		s.Error(err)
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, `DROP OWNED BY `+name+`; DROP ROLE `+name); err != nil {
		s.Errorf("role %s is left: %s", name, err)
	}
}

// The rights of the duty gateway are enough for what a gateway serves from the database.
func TestAGatewayNeedsTheRightsOfItsDutyAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.withRole("gateway").startGateway(nil)
	if _, err := f.pool.Exec(t.Context(), `DELETE FROM penstock.result`); postgres.Code(err) != "42501" {
		t.Fatalf("the gateway has more rights than its duty: %v", err)
	}
	conn, err := f.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = slot.Warm(t.Context(), conn.Conn())
	conn.Release()
	if err != nil {
		t.Error(err)
	}
	s.startNode(8)
	file, _ := f.upload(t, func(w io.Writer) {
		_, _ = io.WriteString(w, line("a", `{"model":"m"}`)+line("b", `{"model":"m","fail":true}`))
	})
	b := s.ends(t, f, f.batch(t, file).ID, "completed")
	if b.Counts.Completed != 1 || b.Counts.Failed != 1 {
		t.Errorf("got %+v", b)
	}
	held, _ := f.upload(t, func(w io.Writer) { _, _ = io.WriteString(w, line("a", hold)) })
	open := f.batch(t, held)
	s.ends(t, f, open.ID, "in_progress")
	f.call(t, "POST", "/v1/batches/"+open.ID+"/cancel", nil, &b)
	s.ends(t, f, open.ID, "cancelled")
	var gone map[string]any
	if status := f.call(t, "DELETE", "/v1/files/"+file, nil, &gone); status != 200 {
		t.Errorf("delete: %d %v", status, gone)
	}
	status, p := f.predict(t, "/v1/predictions", `{"version":"m","input":{"prompt":"x"},"webhook":"https://example.com/"}`, "Prefer", "wait=30")
	if status != 201 || p.Status != "succeeded" {
		t.Errorf("got %d %+v", status, p)
	}
	if status := f.call(t, "POST", "/v1/predictions/"+p.ID+"/cancel", nil, &p); status != 200 {
		t.Errorf("cancel: %d", status)
	}
	s.eventually("the webhook is pushed", func() bool {
		return s.count(`SELECT count(*) FROM penstock.prediction WHERE notified_at IS NULL`) == 0
	})
}
