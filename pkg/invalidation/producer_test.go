package invalidation

import (
	"context"
	"database/sql"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/penstock/penstock/internal/postgres"
)

// TestAProducersRolePushesBySQLAndIsToldSoByGo logs in as a role that may push and nothing else.
func TestAProducersRolePushesBySQLAndIsToldSoByGo(t *testing.T) {
	b := newBed(t, Config{})
	role := "producer_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	b.exec(b.pool, `CREATE ROLE `+role+` LOGIN`)
	t.Cleanup(func() { _, _ = b.pool.Exec(context.WithoutCancel(b.ctx), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	b.exec(b.pool, `SELECT penstock.grant_duty('push', '`+role+`')`)
	at, err := url.Parse(b.pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	at.User = url.User(role)
	producer, err := postgres.Open(b.ctx, postgres.Config{DSN: at.String(), MaxConns: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer producer.Close()
	one := Push{Payload: json.RawMessage(`1`)}
	_, opened := Open(b.ctx, producer, b.q.Name)
	_, pushed := Definition[int]{Name: b.q.Name}.Push(b.ctx, producer, 1)
	for verb, err := range map[string]error{"Open": opened, "Push": pushed} {
		if postgres.Code(err) != "42501" || !strings.Contains(err.Error(), "penstock grants lists") ||
			!strings.Contains(err.Error(), "PushSQLTx") {
			t.Errorf("%s by a producer: %v, want it refused with the way that is open", verb, err)
		}
	}
	db, err := sql.Open("pgx", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tx, err := db.BeginTx(b.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := PushSQLTx(b.ctx, tx, b.q.Name, one); err != nil || len(got) != 1 || got[0].Verdict != Inserted {
		t.Errorf("PushSQLTx by a producer: %v (%v)", got, err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}
