package web

import (
	"context"
	"fmt"
	"html/template"
	"math"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const (
	modelsMax     = 500
	instancesMax  = 1000
	heldSlotsMax  = 5000
	drawnSlotsMax = 128 // of one instance
)

// modelsView is the models with their instances.
type modelsView struct {
	Model  string
	Models []modelCard
	Legend template.HTML
	Capped bool
}

// modelCard is a model with its instances.
type modelCard struct {
	operator.Model
	Down      bool // it has instances and none is usable
	Instances []instanceRow
}

// instanceRow is an instance with the picture of its slots.
type instanceRow struct {
	operator.Instance
	Grid, Data template.HTML
	More       int // slots that the picture leaves out
	P95        *float64
	Calls      int64 // that P95 is of
	ColdStarts int64
	Mismatch   bool // the worker reports more running calls than slots are leased
	CheckedAt  time.Time
}

func (d *Dashboard) modelPages() {
	d.page(page{
		path: "models", nav: "Models", section: "Fleet", title: "Models and instances", template: "models", live: true,
		read: d.models,
	})
	instance := []string{"model", "server"}
	d.verb(verb{
		name: "drain_instance", title: "Drain instance", role: operatorRole, objects: instance,
		effect:  "No new call is sent to the instance; those in flight end. Registering it again ends the drain.",
		preview: d.instancePreview,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			err := d.change.DrainInstance(ctx, in.Get("model"), in.Get("server"), by)
			return fmt.Sprintf("Instance %s of %s drains.", in.Get("server"), in.Get("model")), err
		},
	})
	d.verb(verb{
		name: "register_instance", title: "Register instance again", role: administrator, objects: instance,
		fields: []field{
			{Name: "endpoint", Label: "Endpoint", Kind: "text", Hint: "empty: as it is registered"},
			{Name: "slots", Label: "Slots", Kind: "number", Hint: "empty: as it is registered"},
		},
		effect:  "Ends a drain and a quarantine: calls are sent to the instance again after its next probe.",
		preview: d.instancePreview, do: d.registerInstance,
	})
	d.verb(verb{
		name: "remove_instance", title: "Remove instance", role: administrator, destroys: true, objects: instance,
		effect: "Deletes the instance; one of a deployment drains until its backend has removed it. " +
			"It is refused while slots of it are held: drain it first, and wait.",
		preview: d.instancePreview,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			err := d.change.RemoveInstance(ctx, in.Get("model"), in.Get("server"), false, by)
			return fmt.Sprintf("Instance %s of %s is removed.", in.Get("server"), in.Get("model")), err
		},
	})
}

func (d *Dashboard) instancePreview(ctx context.Context, in form) (preview, error) {
	i, err := d.db.Instance(ctx, in.Get("model"), in.Get("server"))
	if err != nil {
		return preview{}, err
	}
	return preview{
		Count: fmt.Sprintf("%d slots, %d of them held", i.Slots, i.Held),
		Facts: []fact{{"endpoint", i.Endpoint}, {"state", i.State}},
	}, nil
}

func (d *Dashboard) registerInstance(ctx context.Context, in form, by invalidation.By) (string, error) {
	i, err := d.change.Instance(ctx, in.Get("model"), in.Get("server"))
	if err != nil {
		return "", err
	}
	if endpoint := in.Get("endpoint"); endpoint != "" {
		i.Endpoint = endpoint
	}
	if in.Get("slots") != "" {
		slots, err := in.Number("slots", 1, math.MaxInt32)
		if err != nil {
			return "", err
		}
		i.Slots = int32(slots) //nolint:gosec // Number has its bounds
	}
	return fmt.Sprintf("Instance %s of %s is registered.", i.Server, i.Model), d.change.RegisterInstance(ctx, i, by)
}

func (d *Dashboard) models(ctx context.Context, q query) (any, error) {
	v := modelsView{Model: q.Get("model"), Legend: picture.SlotLegend()}
	models, err := d.modelList(ctx)
	if err != nil {
		return nil, err
	}
	instances, slots, err := d.slots(ctx)
	if err != nil {
		return nil, err
	}
	times, err := cached(ctx, d, "instance times", 15*time.Second,
		func(ctx context.Context) ([]operator.InstanceTimes, error) {
			return d.db.InstanceTimes(ctx, "", instancesMax)
		})
	if err != nil {
		return nil, err
	}
	v.Capped = len(models) >= modelsMax || len(instances) >= instancesMax || len(slots) >= heldSlotsMax
	rows := d.instanceRows(instances, slots, times)
	for _, m := range models {
		if v.Model == "" || v.Model == m.Name {
			v.Models = append(v.Models, modelCard{
				Model: m, Down: m.Instances > 0 && m.Usable == 0, Instances: rows[m.Name],
			})
		}
	}
	if v.Model != "" && len(v.Models) == 0 && !v.Capped {
		return nil, fmt.Errorf("model %q: %w", v.Model, invalidation.ErrNotFound)
	}
	return v, nil
}

// slots returns the instances and the slots that are held.
func (d *Dashboard) slots(ctx context.Context) ([]operator.Instance, []operator.Slot, error) {
	instances, err := cached(ctx, d, "instances", beat, func(ctx context.Context) ([]operator.Instance, error) {
		return d.db.Instances(ctx, "", operator.InstanceKey{}, instancesMax)
	})
	if err != nil {
		return nil, nil, err
	}
	slots, err := cached(ctx, d, "slots", beat, func(ctx context.Context) ([]operator.Slot, error) {
		return d.db.Slots(ctx, "", 0, heldSlotsMax)
	})
	return instances, slots, err
}

// instanceName names an instance.
type instanceName struct{ model, server string }

// slotsByInstance returns the held slots of each instance by their numbers.
func slotsByInstance(slots []operator.Slot) map[instanceName]map[int32]operator.Slot {
	held := map[instanceName]map[int32]operator.Slot{}
	for _, s := range slots {
		of := instanceName{s.Model, s.Server}
		if held[of] == nil {
			held[of] = map[int32]operator.Slot{}
		}
		held[of][s.Number] = s
	}
	return held
}

// instanceRows returns the rows of instances by model.
func (d *Dashboard) instanceRows(
	instances []operator.Instance, slots []operator.Slot, times []operator.InstanceTimes,
) map[string][]instanceRow {
	held := slotsByInstance(slots)
	measured := map[instanceName]operator.InstanceTimes{}
	for _, t := range times {
		measured[instanceName{t.Model, t.Server}] = t
	}
	rows := map[string][]instanceRow{}
	for _, i := range instances {
		of := instanceName{i.Model, i.Server}
		row := instanceRow{
			Instance: i, P95: measured[of].P95, Calls: measured[of].Calls, ColdStarts: measured[of].ColdStarts,
		}
		row.Mismatch = i.Active != nil && int64(*i.Active) > i.Held
		if i.CheckedAt != nil {
			row.CheckedAt = *i.CheckedAt
		}
		grid := picture.SlotGrid{Title: "Slots of " + i.Model + " " + i.Server, Slots: d.slotCells(i, held[of])}
		row.More = int(i.Slots) - len(grid.Slots)
		row.Grid, row.Data = grid.HTML(), picture.Data(grid.Table())
		rows[i.Model] = append(rows[i.Model], row)
	}
	return rows
}

func (d *Dashboard) slotCells(i operator.Instance, held map[int32]operator.Slot) []picture.Slot {
	free := freeSlotState(i)
	cells := make([]picture.Slot, min(int(i.Slots), drawnSlotsMax))
	for n := range cells {
		cells[n].State = free
		s, leased := held[int32(n)] //nolint:gosec // at most drawnSlotsMax
		if !leased {
			continue
		}
		cells[n].State = picture.SlotBusy
		cells[n].Detail = fmt.Sprintf("node %d, since %s", s.NodeID, s.LeasedAt.UTC().Format("15:04:05"))
		if s.DoubtAt != nil {
			cells[n].State, cells[n].Detail = picture.SlotDoubt, s.Doubt
		}
		if s.EntryID != nil {
			cells[n].Href = d.cfg.Path + "entries/" + strconv.FormatInt(*s.EntryID, 10)
		}
	}
	return cells
}

// freeSlotState is the state of the slots of an instance that no node holds.
func freeSlotState(i operator.Instance) picture.SlotState {
	switch {
	case i.Draining:
		return picture.SlotDraining
	case i.State == "starting" || i.State == "unknown":
		return picture.SlotLoading
	case i.State == "unhealthy" || i.State == "defunct" || i.QuarantinedUntil != nil:
		return picture.SlotUnhealthy
	}
	return picture.SlotIdle
}
