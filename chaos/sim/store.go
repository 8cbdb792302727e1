package sim

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// store is a database in memory: it answers the statements of the product. A transaction sees and
// changes everything by itself, one after another, as if each had locked all tables: what Postgres
// may do beyond that within one statement is the matter of models/ and of the tests of races.
type store struct {
	tables *tables
	turn   chan struct{} // holds one; whoever takes it runs a transaction
}

func newStore(queues ...string) *store {
	s := &store{tables: newTables(queues...), turn: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	return s
}

// transact runs statements that commit together.
func (s *store) transact(ctx context.Context, do func(t *tables, now time.Time) error) error {
	select {
	case <-s.turn:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.turn <- struct{}{} }()
	before := s.tables.clone()
	if err := do(s.tables, time.Now()); err != nil {
		s.rollBack(before)
		return err
	}
	return nil
}

// rollBack undoes what a transaction did. Elections are decided elsewhere and stay.
func (s *store) rollBack(to *tables) {
	to.sequences, to.term = s.tables.sequences, s.tables.term
	s.tables = to
}

// fate is what becomes of a call of the store.
type fate int

const (
	pass    fate = iota
	cut          // the connection ends before the server sees the statement
	swallow      // the statement takes effect and its answer is lost
	late         // the answer comes later
	mute         // the statement takes effect, and its answer never comes
)

// gate decides when a call goes on and what becomes of it. detail tells calls of one process apart that do the same;
// it is called while the call waits.
type gate interface {
	enter(ctx context.Context, what string, detail func() string) (fate, time.Duration, error)
}

var errCut = errors.New("connection: " + io.ErrUnexpectedEOF.Error())

// connection is a process's way to the store. It implements postgres.DB.
type connection struct {
	statementRunner
	store *store
	gate  gate
}

func connect(s *store, g gate) *connection {
	c := &connection{store: s, gate: g}
	c.run = c.runAlone
	return c
}

// call passes the gate and runs do as one transaction.
func (c *connection) call(
	ctx context.Context, what string, detail func() string, do func(t *tables, now time.Time) error,
) error {
	f, wait, err := c.gate.enter(ctx, what, detail)
	if err != nil {
		return err
	}
	if f == cut {
		return errCut
	}
	if err := c.store.transact(ctx, do); err != nil {
		return err
	}
	switch f {
	case swallow:
		return errCut
	case late:
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (c *connection) runAlone(ctx context.Context, sql string, args []any) (r reply, err error) {
	s := statementOf(sql)
	err = c.call(ctx, s.name, func() string { return text(args) }, func(t *tables, now time.Time) (err error) {
		r, err = s.do(t, now, args)
		return err
	})
	if err != nil {
		return reply{}, err
	}
	return r, nil
}

// SendBatch implements postgres.DB: the statements are one transaction.
func (c *connection) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	answers := &results{batch: b}
	answers.err = c.call(ctx, namesOf(b), func() string { return detailOf(b) }, func(t *tables, now time.Time) error {
		for _, q := range b.QueuedQueries {
			r, err := statementOf(q.SQL).do(t, now, q.Arguments)
			if err != nil {
				return err
			}
			answers.replies = append(answers.replies, r)
		}
		return nil
	})
	return answers
}

// Begin implements postgres.DB.
func (c *connection) Begin(ctx context.Context) (pgx.Tx, error) {
	f, _, err := c.gate.enter(ctx, "begin", nothing)
	if err == nil && f == cut {
		err = errCut
	}
	if err != nil {
		return nil, err
	}
	select {
	case <-c.store.turn:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	t := &transaction{connection: c, before: c.store.tables.clone()}
	t.run = t.runWithin
	return t, nil
}

// transaction is a transaction of several statements. Other processes go on between them, up to their
// next call of the store.
type transaction struct {
	pgx.Tx
	statementRunner
	connection *connection
	before     *tables
	ended      bool
}

func (t *transaction) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.statementRunner.Exec(ctx, sql, args...)
}

func (t *transaction) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.statementRunner.Query(ctx, sql, args...)
}

func (t *transaction) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.statementRunner.QueryRow(ctx, sql, args...)
}

// Begin implements pgx.Tx. A savepoint is not needed: no statement after an error is run.
func (t *transaction) Begin(context.Context) (pgx.Tx, error) { return nested{t}, nil }

func (t *transaction) runWithin(ctx context.Context, sql string, args []any) (r reply, err error) {
	s := statementOf(sql)
	if err := t.enter(ctx, s.name, args); err != nil {
		return reply{}, err
	}
	return s.do(t.connection.store.tables, time.Now(), args)
}

func (t *transaction) enter(ctx context.Context, what string, args []any) error {
	if t.ended {
		return pgx.ErrTxClosed
	}
	f, _, err := t.connection.gate.enter(ctx, "in a transaction: "+what, func() string { return text(args) })
	if err == nil && f == cut {
		err = errCut
	}
	return err
}

func (t *transaction) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	answers := &results{batch: b}
	answers.err = t.enter(ctx, namesOf(b), nil)
	for _, q := range b.QueuedQueries {
		if answers.err == nil {
			var r reply
			r, answers.err = statementOf(q.SQL).do(t.connection.store.tables, time.Now(), q.Arguments)
			answers.replies = append(answers.replies, r)
		}
	}
	return answers
}

func (t *transaction) Commit(ctx context.Context) error {
	if t.ended {
		return pgx.ErrTxClosed
	}
	f, _, err := t.connection.gate.enter(ctx, "commit", nothing)
	if err != nil || f == cut {
		t.abort()
		return errors.Join(errCut, err)
	}
	t.ended = true
	t.connection.store.turn <- struct{}{}
	switch f {
	case swallow:
		return errCut
	case mute:
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (t *transaction) Rollback(context.Context) error {
	if !t.ended {
		t.abort()
	}
	return nil
}

func (t *transaction) abort() {
	t.ended = true
	t.connection.store.rollBack(t.before)
	t.connection.store.turn <- struct{}{}
}

// nested is a transaction within another one: its end is that of the other one.
type nested struct{ *transaction }

func (nested) Commit(context.Context) error   { return nil }
func (nested) Rollback(context.Context) error { return nil }
