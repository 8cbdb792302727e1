package inference

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// A device that is lost during several calls says nothing about any of them, as the death of a node with several
// suspects does (pkg/tasknode/suspect.go). What follows for an entry whose call ended with the device lost:
//
//  1. It is a suspect until it is served. Suspects leave the instance to other entries until one of those is served
//     there; if none is, one suspect tries it each suspectWait.
//  2. Suspects run one at a time at an instance, and one that was running during two losses runs alone there. What
//     finds no instance so goes back unspent: a run does not wait for one.
//  3. The loss is harm of the entry if its call was alone, the device had served before, and no other entry lost it
//     since. lossMax times, or on harmedMax instances, end the entry.
//  4. Any other loss costs the entry nothing, freeMax times on a node, and an attempt from then on.
//
// So an entry is not ended because a neighbour loses the device: by 3 it was alone, and before it pays by 4 it has been
// kept apart from that neighbour, and has left the device to others. And an entry that always loses the device ends: by
// 3 if it is the only one or others are served in between, else by 4 after freeMax runs on each node and those that
// its queue allows, whichever other entries there are.

// caution is what an entry asks of an instance because of what its calls before came to.
type caution uint8

const (
	together caution = iota // nothing
	apart                   // no other suspect runs there
	alone                   // no other call runs there
)

// device is what this node knows of the device of an instance.
type device struct {
	served time.Time // a call of this node last ended well there
	lost   time.Time // it was lost for the first time since then; zero: it was not
	last   time.Time // it was lost, but for losses of entries that were no suspects yet
	by     string    // the only entry that has lost it since then, each time alone; empty: there is none
}

// loss is what a call that ended with the device lost says of its entry.
type loss struct {
	during bool      // the device may have been lost during the call, and not before it
	sole   bool      // the call was alone, the device had served before, and no other entry of this node lost it since
	served time.Time // the device had served then
}

// lose notes that a call which began at a time found the device of its instance lost. A call for several entries
// has no entry.
func (b *blame) lose(entry string, alone bool, instance int32, began, now time.Time) loss {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.deviceOf(instance)
	switch {
	case d.lost.IsZero():
		d.lost, d.last = now, now
		if alone && !d.served.IsZero() {
			d.by = entry
		}
	case !alone || d.by != entry:
		d.by = ""
	}
	l := loss{sole: entry != "" && d.by == entry, served: d.served}
	l.during = l.sole || !d.lost.Before(began)
	if entry == "" {
		return l
	}
	of := b.of(entry)
	if of.losses > 0 {
		d.last = now
	}
	if l.during || of.losses == 0 {
		of.losses++
	}
	return l
}

// accompanied notes that a loss which an entry alone had noted here was not its own.
func (b *blame) accompanied(instance int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deviceOf(instance).by = ""
}

// lose notes that the call found the device of its instance lost.
func (d *dispatch) lose() loss {
	entry := d.call.Entry
	if d.shared() {
		entry = ""
	} else {
		d.lost++
	}
	return d.blame.lose(entry, d.held.solitary(), d.held.endpoint.ID, d.began, time.Now())
}

// suspect notes that an entry is to be kept apart from others.
func (b *blame) suspect(entry string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.of(entry).losses++
}

// knowLosses takes over what other nodes know of an entry.
func (b *blame) knowLosses(entry string, losses int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.of(entry)
	of.losses = max(of.losses, losses)
}

// deviceOf is called with mu held.
func (b *blame) deviceOf(instance int32) *device {
	if b.devices[instance] == nil {
		if len(b.devices) >= blamedMax {
			clear(b.devices)
		}
		b.devices[instance] = &device{}
	}
	return b.devices[instance]
}

func (b *blame) caution(entry string) caution {
	return caution(min(b.losses(entry), int(alone))) //nolint:gosec // bounded
}

func (b *blame) losses(entry string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if of := b.entries[entry]; of != nil {
		return of.losses
	}
	return 0
}

// unproven adds the instances that lost their device within a time and have served nothing since. Suspects leave them
// to other entries, which show whether the device is well again.
func (b *blame) unproven(exclude map[int32]bool, within time.Duration, now time.Time) map[int32]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	exclude = maps.Clone(exclude)
	if exclude == nil {
		exclude = map[int32]bool{}
	}
	for id, d := range b.devices {
		if !d.lost.IsZero() && now.Sub(d.last) < within {
			exclude[id] = true
		}
	}
	return exclude
}

// slotRequest says what the entry needs of a slot, on an instance that is not excluded.
func (d *dispatch) slotRequest(exclude map[int32]bool) slotRequest {
	r := slotRequest{
		affinity: d.affinity(), exclude: exclude, caution: d.blame.caution(d.call.Entry), reserve: runMax(d.model),
	}
	if r.caution > together {
		r.exclude = d.blame.unproven(exclude, d.tuning.suspectWait, time.Now())
	}
	return r
}

// suspectWait is before a suspect comes back, longer and less regular after each loss: on several nodes two of them
// would meet at an instance time and again.
func (d *dispatch) suspectWait() time.Duration {
	most := d.tuning.readyWait << min(d.blame.losses(d.call.Entry), 5)
	return time.Duration(rand.Float64() * float64(most)) //nolint:gosec // jitter
}

const noteHarmSQL = `SELECT instances, times FROM penstock.note_harm($1, $2, $3, $4)`

// inCompanySQL says whether instance $1 may have had other calls than that of entry $3 of queue $2 on node $4 when that
// ended: those of a gateway, those in doubt, and those of any entry that lost its device after $5 as well, or, if $6,
// of any other node.
const inCompanySQL = `
SELECT EXISTS (
    SELECT FROM penstock.slot s LEFT JOIN penstock.node n ON n.id = s.node_id
     WHERE s.instance_id = $1
       AND (s.doubt_at IS NOT NULL OR n.kind = 'gateway' OR ($6 AND s.node_id <> $4)))
    OR EXISTS (
    SELECT FROM penstock.entry_harm h
     WHERE h.instance_id = $1 AND (h.queue_id, h.entry_id) <> ($2::integer, $3::bigint)
       AND h.at > $5::timestamptz)`

// What nodes note of calls that lost their device together.
const (
	classSuspect = "suspect"   // of the row that an entry has, beside those that count
	lossSettle   = time.Second // until each node that had calls there has noted it
)

// noteHarm counts that a run of the entry ended in a lost device or out of memory, over all nodes, if its call was
// alone at the instance. An entry is not run again once its runs ended so on two instances, or on one instance three
// times with the device lost or five times out of memory.
func (d *dispatch) noteHarm(ctx context.Context, class worker.Class, l loss) {
	solitary, lost := d.held.solitary(), class == worker.ClassContextLost
	if !lost && !solitary {
		d.blame.suspect(d.call.Entry)
	}
	if lost && !l.during || !lost && !solitary {
		return
	}
	if err := d.countHarm(ctx, class, l); err != nil {
		d.log.Warn("note harm", "entry", d.run.Entry.ID, "error", err)
	}
}

func (d *dispatch) countHarm(ctx context.Context, class worker.Class, l loss) error {
	lost := class == worker.ClassContextLost
	open := context.WithoutCancel(ctx)
	if lost {
		_, times, err := d.harm(open, classSuspect)
		if d.blame.knowLosses(d.call.Entry, times); err != nil || !l.sole {
			return err
		}
		if pause(ctx, lossSettle); ctx.Err() != nil {
			return nil // what other nodes note of it has not come
		}
	}
	within := lossSettle + d.tuning.lossWindow
	if lost {
		within = max(within, time.Since(l.served))
	}
	began := time.Now().Add(-within)
	limited, cancel := context.WithTimeout(open, d.tuning.exchangeMax)
	defer cancel()
	// The begin is a time of the database's clock: one that the statement counted back from its own time would be later
	// by as long as it waits for a connection.
	var clock postgres.Clock
	if err := clock.Read(limited, d.db); err != nil {
		return err
	}
	company := false
	if err := d.db.QueryRow(limited, inCompanySQL, d.held.endpoint.ID, d.run.Queue.ID, d.run.Entry.ID,
		d.pool.holder.Node(), clock.Now().Add(-time.Since(began)), !lost).Scan(&company); err != nil {
		return err
	}
	if company {
		d.blame.accompanied(d.held.endpoint.ID)
		return nil
	}
	instances, times, err := d.harm(open, class)
	switch {
	case err != nil:
		return err
	case lost && instances < harmedMax && times < lossMax:
	case !lost && instances < harmedMax && times < oomMax:
	case lost:
		d.poison = invalidation.Permanent(invalidation.WithClass("poison",
			fmt.Errorf("%d runs of it alone on %d instances ended with the device lost", times, instances)))
	default:
		d.poison = invalidation.Permanent(invalidation.WithClass(string(class),
			fmt.Errorf("%d runs of it alone on %d instances ran out of memory", times, instances)))
	}
	return nil
}

// harm adds to what is noted of the entry on the instance, and returns it for all instances.
func (d *dispatch) harm(ctx context.Context, class worker.Class) (instances, times int, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.tuning.exchangeMax)
	defer cancel()
	return noteHarm(ctx, d.db, d.run.Queue.ID, d.run.Entry.ID, d.held.endpoint.ID, class)
}

func noteHarm(
	ctx context.Context, db postgres.DB, queue int32, entry invalidation.EntryID, instance int32, class worker.Class,
) (instances, times int, err error) {
	err = db.QueryRow(ctx, noteHarmSQL, queue, entry, instance, string(class)).Scan(&instances, &times)
	if err != nil {
		return 0, 0, fmt.Errorf("note harm of entry %d: %w", entry, err)
	}
	return instances, times, nil
}

const sweepHarmSQL = `
DELETE FROM penstock.entry_harm h
 WHERE h.at < clock_timestamp() - interval '1 minute'
   AND NOT penstock.entry_lives(h.queue_id, h.entry_id)`
