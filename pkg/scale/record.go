package scale

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/oneline"
)

const (
	announceSQL = `
SELECT penstock.announce_instance($1, $2, $3, $4, '{}', NULL, $5, nullif($6, ''), $7, 'autoscaler', $8)`
	drainSQL = `
SELECT penstock.drain_instance(i.model, i.server, $4, 'autoscaler')
  FROM penstock.instance i WHERE i.deployment = $1 AND i.model = $2 AND i.server = $3`
	undrainSQL = `SELECT penstock.end_scale_drain($1)`
	// lockSQL locks the rows that a round changes, with those that it takes over, before the first change, which locks
	// the row of inference_version: a probe locks the row of its instance, and then that one.
	lockSQL = `
SELECT FROM penstock.instance i
 WHERE i.model = $1 AND (i.server = ANY ($2) OR i.id = ANY ($3) OR i.endpoint = ANY ($4)) ORDER BY i.id FOR UPDATE`
	// lockLimitsSQL comes before all of these where an instance may be new, whose model's queue may have to be made.
	lockLimitsSQL = `SELECT penstock.lock_all_limits()`
	forgetSQL     = `SELECT penstock.remove_instance($1, $2, false, $3, 'autoscaler')`

	// observedSQL writes what a round found, and the order that it is about to give. Times in the future, from before
	// the clock was set back, are set to now. Starts that take the place of instances that went ($14) begin now. Where
	// instances were taken over ($15), the number was decided without them: it is to be decided anew.
	observedSQL = `
INSERT INTO penstock.deployment_state AS s
       (name, existing, starting, seen_at, order_id, ordered, ordered_at, failures, failed_at, retry_at, error,
        error_kind, place, removing, removing_since, unhealthy)
SELECT $1, $2, $3::timestamptz[], clock_timestamp(), coalesce($4::bigint, 0), coalesce($5::integer, 0),
       CASE WHEN $4::bigint IS NOT NULL THEN clock_timestamp() END, $6,
       CASE WHEN $7 THEN clock_timestamp() END, clock_timestamp() + $8::interval, nullif($9, ''),
       $16, nullif($10, ''), $11, coalesce($12::jsonb, '{}'), $13
 WHERE EXISTS (SELECT FROM penstock.deployment d WHERE d.name = $1)
ON CONFLICT (name) DO UPDATE
   SET existing = excluded.existing, starting = excluded.starting, seen_at = excluded.seen_at, place = excluded.place,
       removing = excluded.removing, removing_since = excluded.removing_since, unhealthy = excluded.unhealthy,
       order_id = coalesce($4::bigint, s.order_id), ordered = coalesce($5::integer, s.ordered),
       ordered_at = CASE WHEN $14 THEN excluded.seen_at
                         WHEN $5 > s.ordered OR s.ordered_at IS NULL THEN coalesce(excluded.ordered_at, s.ordered_at)
                         WHEN s.ordered_at > excluded.seen_at THEN excluded.seen_at
                         ELSE s.ordered_at END, failures = excluded.failures,
       failed_at = coalesce(excluded.failed_at, CASE WHEN s.failed_at > excluded.seen_at THEN excluded.seen_at
                                                     ELSE s.failed_at END),
       no_room_at = CASE WHEN s.no_room_at > excluded.seen_at THEN excluded.seen_at ELSE s.no_room_at END,
       applied_at = CASE WHEN s.applied_at > excluded.seen_at THEN excluded.seen_at ELSE s.applied_at END,
       decided_at = CASE WHEN $15 THEN NULL
                         WHEN s.decided_at > excluded.seen_at THEN excluded.seen_at ELSE s.decided_at END,
       error = excluded.error, error_kind = excluded.error_kind,
       retry_at = CASE WHEN $7 THEN excluded.retry_at WHEN $6 = 0 AND s.failures > 0 THEN NULL ELSE s.retry_at END`

	// appliedSQL confirms an order. One that began starts ($4) ends the failures of orders before it, one that began
	// none proves nothing. Starts that failed ($3 is their kind of error) are forgiven by an instance that is ready.
	appliedSQL = `
UPDATE penstock.deployment_state
   SET applied_id = $2, applied_at = clock_timestamp(),
       failures = CASE WHEN error_kind = $3 OR NOT $4 THEN failures ELSE 0 END,
       error = CASE WHEN error_kind = $3 OR NOT $4 THEN error END,
       error_kind = CASE WHEN error_kind = $3 OR NOT $4 THEN error_kind ELSE '' END
 WHERE name = $1`
	// failedSQL, noRoomSQL and waitSQL set ordered and ordered_at back to what they were before the order:
	// the starts that it was to begin do not count as under way. Its number is used up: what follows is another order,
	// also where the backend has carried this one out.
	failedSQL = `
UPDATE penstock.deployment_state
   SET failures = failures + 1, failed_at = clock_timestamp(), error = $2, error_kind = $3,
       retry_at = clock_timestamp() + $4::interval, ordered = $5, ordered_at = $6,
       order_id = order_id + 1
 WHERE name = $1`
	noRoomSQL = `
UPDATE penstock.deployment_state
   SET no_room_at = clock_timestamp(), error = nullif($2, ''), error_kind = $3,
       retry_at = clock_timestamp() + $4::interval, ordered = $5, ordered_at = $6,
       order_id = order_id + 1
 WHERE name = $1`
	waitSQL = `
UPDATE penstock.deployment_state
   SET error = $2, error_kind = 'no room', retry_at = clock_timestamp() + $3::interval, ordered = $4, ordered_at = $5,
       order_id = order_id + 1
 WHERE name = $1`
	noteSQL = `
INSERT INTO penstock.deployment_state AS s (name, error)
SELECT $1, $2 WHERE EXISTS (SELECT FROM penstock.deployment d WHERE d.name = $1)
ON CONFLICT (name) DO UPDATE SET error = excluded.error, error_kind = ''`
)

// write writes what a round of the applier found and did, within the term. Nothing is written where it found nothing
// new.
func (a *applier) write(ctx context.Context, s applied, place string, todo *steps) error {
	found := s
	found.Place = place
	if todo.failed > 0 {
		found.Failures, found.Error, found.ErrorKind = s.Failures+1, todo.message, startError
	} else if todo.healthy || s.Failures == 0 {
		found.Failures = 0
		if !s.noRoom(s.now()) || s.ErrorKind != noRoomError {
			found.Error, found.ErrorKind = "", ""
		}
	}
	var notice string
	a.noted(s.Name, func(n *notes) { notice = n.message() })
	found.Error = cmp.Or(found.Error, notice, todo.refusal(), todo.overdue)
	if !todo.changes(s, found) {
		return nil
	}
	err := a.fence.InTx(ctx, func(tx pgx.Tx) error { return todo.writeTx(ctx, tx, found) })
	if err == nil {
		a.noted(s.Name, func(n *notes) { n.refuse(todo, time.Now()) })
		a.count(func(st *OrderStatus) { st.Drained += int64(len(todo.drain)) })
	}
	return err
}

// writeTx is the transaction of write: the locks, the instances, then the state of the deployment as it was found.
func (p *steps) writeTx(ctx context.Context, tx pgx.Tx, s applied) error {
	if len(p.register) > 0 {
		if _, err := tx.Exec(ctx, lockLimitsSQL); err != nil {
			return fmt.Errorf("lock limits: %w", err)
		}
	}
	names := slices.Concat(p.forget, p.drain, servers(p.register))
	if _, err := tx.Exec(ctx, lockSQL, s.Model, names, p.undrain, endpoints(p.register)); err != nil {
		return fmt.Errorf("lock instances: %w", err)
	}
	refused, err := p.writeInstances(ctx, tx, s)
	if err != nil {
		return err
	}
	if refused != nil {
		s.Error, s.ErrorKind = messageOf(refused), ""
	}
	if len(p.undrain) > 0 {
		if _, err := tx.Exec(ctx, undrainSQL, p.undrain); err != nil {
			return fmt.Errorf("end drains: %w", err)
		}
	}
	var id *int64
	var count *int
	if p.order != nil {
		id, count = &p.order.ID, &p.order.Count
	}
	_, err = tx.Exec(ctx, observedSQL, s.Name, p.existing, p.starts(), id, count, s.Failures, p.failed > 0,
		backoff(s.Failures), s.Error, s.Place,
		append([]string{}, slices.Sorted(maps.Keys(p.removing))...), p.removing, p.unhealthySince(), p.anew,
		p.adopted(), s.ErrorKind)
	return err
}

// writeInstances registers, forgets and drains instances, each under a savepoint: one that is refused holds up no other
// one, and is told by the first error.
func (p *steps) writeInstances(ctx context.Context, tx pgx.Tx, s applied) (refused, err error) {
	each := func(names []string, doing string, change func(tx pgx.Tx, name string) error) (failed map[string]error) {
		failed = map[string]error{}
		for _, name := range names {
			if err != nil {
				return failed
			}
			one := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return change(tx, name) })
			var told *pgconn.PgError
			if one == nil {
				continue
			}
			one = fmt.Errorf("%s %s: %w", doing, name, one)
			if !errors.As(one, &told) || strings.HasPrefix(told.Code, "40") || strings.HasPrefix(told.Code, "57") {
				err = one // of the session or the transaction
				return failed
			}
			failed[name] = one
			refused = cmp.Or(refused, one)
		}
		return failed
	}
	byName := map[string]BackendInstance{}
	for _, i := range p.register {
		byName[i.Name] = i
	}
	p.refused = each(servers(p.register), "register", func(tx pgx.Tx, name string) error {
		return register(ctx, tx, s, byName[name])
	})
	each(p.forget, "forget", func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, forgetSQL, s.Model, name, "its backend does not have it any more")
		return err
	})
	each(p.drain, "drain", func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, drainSQL, s.Name, s.Model, name, fmt.Sprintf("%d desired", s.Desired))
		return err
	})
	return refused, err
}

// register registers an instance that a backend reported: with the slots of the policy where the backend knows none.
// Without the time at which its start began, where that was not followed, its age is no cold start.
func register(ctx context.Context, tx pgx.Tx, s applied, i BackendInstance) error {
	slots := max(i.Slots, 1)
	if i.Slots == 0 {
		slots = s.policy.WithDefaults().Slots
	}
	var began *time.Time
	if s.followed(i.Began) {
		began = &i.Began
	}
	_, err := tx.Exec(ctx, announceSQL, s.Model, i.Name, i.Endpoint, slots, s.Name, i.TemplateHash, began,
		i.Began)
	return err
}

// changes says whether a round has anything to write where found is to replace s: a report is written again before it
// counts as old.
func (p steps) changes(s, found applied) bool {
	steps := len(p.register) + len(p.forget) + len(p.drain) + len(p.undrain)
	old := s.SeenAt == nil || s.ahead || !s.reported() || s.now().Sub(*s.SeenAt) > seenEvery-time.Second
	same := s.Existing != nil && *s.Existing == p.existing && slices.EqualFunc(s.Starting, p.starting, time.Time.Equal)
	newOrder := p.order != nil && (p.order.ID != s.OrderID || p.order.Count != s.Ordered)
	newRemoval := !maps.EqualFunc(p.removing, s.RemovingSince, time.Time.Equal)
	newUnhealthy := !maps.EqualFunc(p.unhealthy, s.Unhealthy, time.Time.Equal)
	return steps > 0 || old || !same || newOrder || newRemoval || newUnhealthy ||
		found.Failures != s.Failures || found.Error != s.Error || found.ErrorKind != s.ErrorKind ||
		found.Place != s.Place
}

func servers(instances []BackendInstance) []string {
	names := make([]string, len(instances))
	for n, i := range instances {
		names[n] = i.Name
	}
	return names
}

func endpoints(instances []BackendInstance) []string {
	all := make([]string, len(instances))
	for n, i := range instances {
		all[n] = i.Endpoint
	}
	return all
}

func (p steps) unhealthySince() map[string]time.Time {
	if p.unhealthy == nil {
		return map[string]time.Time{}
	}
	return p.unhealthy
}

func (p steps) starts() []time.Time {
	if p.starting == nil {
		return []time.Time{}
	}
	return p.starting
}

// backoff is the time until the next try after so many failures in a row.
func backoff(failures int) time.Duration {
	if failures < 1 {
		return 0
	}
	return min(time.Second<<min(failures-1, 10), backoffMax)
}

// pauseAfter is the time until the next try after so many failures in a row, the last of which was cause.
func pauseAfter(cause error, failures int) time.Duration {
	var told interface{ RetryAfter() time.Duration }
	if errors.As(cause, &told) {
		return min(max(backoff(failures), told.RetryAfter()), backoffMax)
	}
	return backoff(failures)
}

// fail records that an order failed. It is given again after a pause.
func (a *applier) fail(ctx context.Context, s applied, cause error) error {
	var kind errorKind
	if errors.Is(cause, ErrNoRoom) {
		kind = noRoomError
	}
	return a.exec(ctx, failedSQL, s.Name, messageOf(cause), kind, pauseAfter(cause, s.Failures+1), s.Ordered,
		s.OrderedAt)
}

// noRoom notes that a backend had no room for a start, and says whether that is all that follows. It is no failure:
// the deployment keeps the instances that it has, and those that are filled later are asked for the rest. But where
// these have the room, they give it up as long as the order has not failed too often.
func (a *applier) noRoom(ctx context.Context, s applied, todo steps, err error) (noted bool, failed error) {
	switch {
	case !errors.Is(err, ErrNoRoom):
		return false, nil
	case todo.rolls: // for one more than desired: the next round drains one first
		return true, a.exec(ctx, noRoomSQL, s.Name, s.Error, s.ErrorKind, time.Duration(0), s.Ordered,
			s.OrderedAt)
	case s.frees:
		return true, a.exec(ctx, waitSQL, s.Name, messageOf(err), freedRetry, s.Ordered, s.OrderedAt)
	case s.behind && !s.failing():
		return false, nil
	}
	return true, a.exec(ctx, noRoomSQL, s.Name, messageOf(err), noRoomError, noRoomRetry, s.Ordered, s.OrderedAt)
}

// note records why a backend does not answer: what it has is unknown, and not zero.
func (a *applier) note(ctx context.Context, s applied, cause error) error {
	if s.Error == messageOf(cause) {
		return nil
	}
	return a.exec(ctx, noteSQL, s.Name, messageOf(cause))
}

// lacks notes that the configuration of this leader has no such backend: the number of the deployment is decided, and
// nothing follows it.
func (a *applier) lacks(ctx context.Context, s applied) error {
	if s.Off || !s.Mode.applies() {
		return nil // nothing is to be started or stopped
	}
	a.count(func(st *OrderStatus) { st.Failed++ })
	return a.note(ctx, s,
		fmt.Errorf("the elected leader is not configured for backend %s: see leader.scale", s.Backend))
}

// exec runs one statement within the term, also where the time of a round is over.
func (a *applier) exec(ctx context.Context, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return a.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

const trimSQL = `DELETE FROM penstock.cold_start WHERE at < clock_timestamp() - interval '7 days'`

func (a *applier) trim(ctx context.Context) {
	if err := a.exec(ctx, trimSQL); err != nil && ctx.Err() == nil {
		a.cfg.Log.WarnContext(ctx, "cannot remove old cold starts", "error", err)
	}
}

// messageMax bounds what is kept of an error of a backend, in characters.
const messageMax = 500

// messageOf is the message of an error as it is stored and shown.
func messageOf(err error) string { return oneline.Short(err.Error(), messageMax) }
