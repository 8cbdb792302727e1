package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// types converts values as the driver does on the way to Postgres and back. It is not safe for several
// goroutines at once.
var (
	types   = pgtype.NewMap()
	typesMu sync.Mutex
)

// jsonText is a value of type json; nil: null.
type jsonText []byte

// typeOf returns the type of Postgres of a value that a statement answers.
func typeOf(v any) (oid uint32, plain any) {
	switch v := v.(type) {
	case nil:
		return pgtype.TextOID, nil
	case jsonText:
		if v == nil {
			return pgtype.JSONOID, nil
		}
		return pgtype.JSONOID, []byte(v)
	case int64:
		return pgtype.Int8OID, v
	case int32:
		return pgtype.Int4OID, v
	case int16:
		return pgtype.Int2OID, v
	case float64:
		return pgtype.Float8OID, v
	case bool:
		return pgtype.BoolOID, v
	case string:
		return pgtype.TextOID, v
	case []string:
		return pgtype.TextArrayOID, v
	case []int64:
		if v == nil {
			v = []int64{}
		}
		return pgtype.Int8ArrayOID, v
	case []int32:
		return pgtype.Int4ArrayOID, v
	case time.Duration:
		return pgtype.IntervalOID, v
	case pgtype.TID:
		return pgtype.TIDOID, v
	case []pgtype.TID:
		if len(v) == 0 {
			return pgtype.TIDArrayOID, nil // array_agg of nothing
		}
		return pgtype.TIDArrayOID, v
	default:
		panic(fmt.Sprintf("no type of Postgres for %T", v))
	}
}

// deliver puts a value that a statement answers where the caller wants it.
func deliver(v, destination any) error {
	typesMu.Lock()
	defer typesMu.Unlock()
	oid, plain := typeOf(v)
	if plain == nil {
		return deliverNull(oid, destination)
	}
	format := types.FormatCodeForOID(oid)
	text, err := types.Encode(oid, format, plain, []byte{})
	if err != nil {
		return err
	}
	return planTo(oid, format, destination).Scan(text, destination)
}

// planKey is what the driver's way from a value to a variable depends on.
type planKey struct {
	oid    uint32
	format int16
	to     reflect.Type
}

// plans are those that the driver found before: it keeps none itself.
var plans = map[planKey]pgtype.ScanPlan{}

func planTo(oid uint32, format int16, destination any) pgtype.ScanPlan {
	k := planKey{oid, format, reflect.TypeOf(destination)}
	plan := plans[k]
	if plan == nil {
		plan = types.PlanScan(oid, format, destination)
		plans[k] = plan
	}
	return plan
}

// deliverNull puts a null where the caller wants it, as one of a type that fits. Otherwise the driver tries all
// types, each time anew.
func deliverNull(oid uint32, destination any) error {
	switch destination.(type) {
	case *pgtype.Float8:
		oid = pgtype.Float8OID
	case *pgtype.Int8:
		oid = pgtype.Int8OID
	case *pgtype.Int4:
		oid = pgtype.Int4OID
	case *pgtype.Bool:
		oid = pgtype.BoolOID
	case *pgtype.TID:
		oid = pgtype.TIDOID
	case **time.Time:
		oid = pgtype.TimestamptzOID
	case *pgtype.FlatArray[pgtype.TID]:
		oid = pgtype.TIDArrayOID
	}
	return planTo(oid, pgx.TextFormatCode, destination).Scan(nil, destination)
}

// arguments are those of a statement, as the product passes them to the driver.
type arguments []any

// argument reads an argument as a value of a type of Postgres.
func argument[T any](a arguments, i int, oid uint32) (v T) {
	typesMu.Lock()
	defer typesMu.Unlock()
	text, err := types.Encode(oid, pgx.BinaryFormatCode, a[i], []byte{})
	if err == nil && text != nil {
		err = types.Scan(oid, pgx.BinaryFormatCode, text, &v)
	}
	if err != nil {
		panic(fmt.Sprintf("argument $%d is %T: %v", i+1, a[i], err))
	}
	return v
}

func (a arguments) number(i int) int64    { return argument[int64](a, i, pgtype.Int8OID) }
func (a arguments) numbers(i int) []int64 { return argument[[]int64](a, i, pgtype.Int8ArrayOID) }

func (a arguments) ints(i int) []int32 { return argument[[]int32](a, i, pgtype.Int4ArrayOID) }

func (a arguments) maybe(i int) []*int32 { return argument[[]*int32](a, i, pgtype.Int4ArrayOID) }

func (a arguments) texts(i int) []string { return argument[[]string](a, i, pgtype.TextArrayOID) }

func (a arguments) bools(i int) []bool { return argument[[]bool](a, i, pgtype.BoolArrayOID) }

func (a arguments) rowPlaces(i int) []pgtype.TID {
	return argument[[]pgtype.TID](a, i, pgtype.TIDArrayOID)
}

// places are the numbers of rows in an argument of type tid[].
func (a arguments) places(i int) (rows []int64) {
	for _, p := range a.rowPlaces(i) {
		rows = append(rows, int64(p.BlockNumber))
	}
	return rows
}

// rows implements pgx.Rows over what a statement answered.
type rows struct {
	pgx.Rows
	left    [][]any
	current []any
	tag     pgconn.CommandTag
	err     error
}

func (r *rows) Close()                        { r.left = nil }
func (r *rows) Err() error                    { return r.err }
func (r *rows) CommandTag() pgconn.CommandTag { return r.tag }

func (r *rows) Next() bool {
	if len(r.left) == 0 {
		return false
	}
	r.current, r.left = r.left[0], r.left[1:]
	return true
}

func (r *rows) Scan(destinations ...any) error {
	if len(destinations) != len(r.current) {
		r.err = fmt.Errorf("a row of %d columns for %d variables", len(r.current), len(destinations))
		return r.err
	}
	for i, d := range destinations {
		if err := deliver(r.current[i], d); err != nil {
			r.err = fmt.Errorf("column %d: %w", i+1, err)
			return r.err
		}
	}
	return nil
}

// row implements pgx.Row.
type row struct{ *rows }

func (r row) Scan(destinations ...any) error {
	if r.err != nil {
		return r.err
	}
	if !r.Next() {
		return pgx.ErrNoRows
	}
	return r.rows.Scan(destinations...)
}

// executor runs statements in one way: each in a transaction of its own, or in one that is open.
type executor func(ctx context.Context, sql string, args []any) (reply, error)

// statementRunner is the part of a connection that statements go through.
type statementRunner struct{ run executor }

// Exec implements postgres.DB.
func (s statementRunner) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	r, err := s.run(ctx, sql, args)
	return pgconn.NewCommandTag(r.tag), err
}

// Query implements postgres.DB.
func (s statementRunner) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r, err := s.run(ctx, sql, args)
	found := &rows{left: r.rows, tag: pgconn.NewCommandTag(r.tag), err: err}
	return found, err
}

// QueryRow implements postgres.DB.
func (s statementRunner) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	r, err := s.run(ctx, sql, args)
	return row{&rows{left: r.rows, err: err}}
}

// results implements pgx.BatchResults over what the statements of a batch answered.
type results struct {
	pgx.BatchResults
	batch   *pgx.Batch
	replies []reply
	err     error
}

func (b *results) next() (r reply) {
	r, b.replies = b.replies[0], b.replies[1:]
	return r
}

func (b *results) Exec() (pgconn.CommandTag, error) { return pgconn.NewCommandTag(b.next().tag), nil }
func (b *results) Query() (pgx.Rows, error)         { return &rows{left: b.next().rows}, nil }
func (b *results) QueryRow() pgx.Row                { return row{&rows{left: b.next().rows}} }

func (b *results) Close() error {
	if b.err != nil {
		return b.err
	}
	for _, q := range b.batch.QueuedQueries {
		var err error
		if q.Fn == nil {
			_, err = b.Exec()
		} else {
			err = q.Fn(b)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// namesOf is what a batch does, for the steps that a failing seed prints.
func namesOf(b *pgx.Batch) string {
	names := make([]string, len(b.QueuedQueries))
	for i, q := range b.QueuedQueries {
		names[i] = statementOf(q.SQL).name
	}
	return strings.Join(names, " + ")
}

// text writes arguments down, so that calls can be told apart and put in order.
func text(args []any) string {
	written, err := json.Marshal(args)
	if err != nil {
		return err.Error()
	}
	return string(written)
}

// detailOf are the arguments of a batch.
func detailOf(b *pgx.Batch) string {
	var all strings.Builder
	for _, q := range b.QueuedQueries {
		all.WriteString(text(q.Arguments))
	}
	return all.String()
}

// nothing is the detail of a call without arguments.
func nothing() string { return "" }
