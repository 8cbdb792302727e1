//go:build failpoints

package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// failpointsVariable names the environment variable that says where a program ends itself. The names that begin with
// PENSTOCK_ are those of internal/config, which refuses others.
const failpointsVariable = "FAILPOINTS"

// failpointPlan is the value of the variable, in JSON. A transaction is named by the first of Points whose text
// matches one of its statements. Before and After are the chances that the program ends itself by SIGKILL before
// such a transaction is told to commit, or after it has committed and before the program acts on that.
type failpointPlan struct {
	Seed   uint64 `json:"seed"`
	Points []struct {
		Name   string  `json:"name"`
		Text   string  `json:"text"`
		Before float64 `json:"before"`
		After  float64 `json:"after"`
	} `json:"points"`
}

// failpointTracer ends the program around commits.
type failpointTracer struct {
	plan  failpointPlan
	texts []*regexp.Regexp
	end   func(at string)

	mu     sync.Mutex
	random *rand.Rand
}

// failpointOf reads the plan; nil without one.
func failpointOf(plan string) (*failpointTracer, error) {
	if plan == "" {
		return nil, nil
	}
	t := &failpointTracer{end: endAt}
	if err := json.Unmarshal([]byte(plan), &t.plan); err != nil {
		return nil, fmt.Errorf("read %s: %w", failpointsVariable, err)
	}
	for _, p := range t.plan.Points {
		text, err := regexp.Compile(p.Text)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", failpointsVariable, err)
		}
		t.texts = append(t.texts, text)
	}
	t.random = rand.New(rand.NewPCG(t.plan.Seed, uint64(os.Getpid())))
	return t, nil
}

var failpointsOnce = sync.OnceValue(func() *failpointTracer {
	t, err := failpointOf(os.Getenv(failpointsVariable))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	return t
})

// failpoints lets the connections of cc end the program as the variable says.
func failpoints(cc *pgx.ConnConfig) {
	if t := failpointsOnce(); t != nil && cc.Tracer == nil {
		cc.Tracer = t
	}
}

// endAt names the point in the log and ends the program as a crash would.
func endAt(at string) {
	fmt.Fprintln(os.Stderr, "failpoint: "+at)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// openBlock is the data of a connection under which the name of its open transaction block is kept: the index
// of a point.
const openBlock = "failpoint"

// point returns the index of the first point that matches one of the statements, len(Points) for none.
func (t *failpointTracer) point(statements ...string) int {
	for i, text := range t.texts {
		for _, sql := range statements {
			if text.MatchString(sql) {
				return i
			}
		}
	}
	return len(t.texts)
}

// begin notes statements that a connection is about to send, and returns the point of the transaction that they
// commit, len(Points) for none.
func (t *failpointTracer) begin(conn *pgx.Conn, statements ...string) int {
	found := t.point(statements...)
	data := conn.PgConn().CustomData()
	if conn.PgConn().TxStatus() == 'I' {
		if word := firstWord(statements[0]); word == "begin" || word == "start" {
			data[openBlock] = len(t.texts)
			return len(t.texts)
		}
		return found
	}
	block, open := data[openBlock].(int)
	if !open {
		block = len(t.texts)
	}
	block = min(block, found)
	data[openBlock] = block
	if firstWord(statements[0]) == "commit" {
		return block
	}
	return len(t.texts)
}

func firstWord(sql string) string {
	word, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(sql)), " ")
	return cmp.Or(strings.TrimSuffix(word, ";"), word)
}

// meet ends the program at a point, by its chance.
func (t *failpointTracer) meet(point int, when string) {
	if point == len(t.texts) {
		return
	}
	p := t.plan.Points[point]
	chance := p.Before
	if when == "after" {
		chance = p.After
	}
	t.mu.Lock()
	hit := t.random.Float64() < chance
	t.mu.Unlock()
	if hit {
		t.end(when + " the commit of " + p.Name)
	}
}

type failpointKey struct{}

// TraceQueryStart implements pgx.QueryTracer.
func (t *failpointTracer) TraceQueryStart(
	ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData,
) context.Context {
	point := t.begin(conn, q.SQL)
	t.meet(point, "before")
	return context.WithValue(ctx, failpointKey{}, point)
}

// TraceQueryEnd implements pgx.QueryTracer.
func (t *failpointTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryEndData) {
	t.met(ctx, q.Err)
}

// TraceBatchStart implements pgx.BatchTracer.
func (t *failpointTracer) TraceBatchStart(
	ctx context.Context, conn *pgx.Conn, b pgx.TraceBatchStartData,
) context.Context {
	statements := []string{""}
	for _, q := range b.Batch.QueuedQueries {
		statements = append(statements, q.SQL)
	}
	point := t.begin(conn, statements...)
	t.meet(point, "before")
	return context.WithValue(ctx, failpointKey{}, point)
}

// TraceBatchQuery implements pgx.BatchTracer.
func (t *failpointTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (t *failpointTracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchEndData) {
	t.met(ctx, b.Err)
}

func (t *failpointTracer) met(ctx context.Context, err error) {
	if point, ok := ctx.Value(failpointKey{}).(int); ok && err == nil {
		t.meet(point, "after")
	}
}
