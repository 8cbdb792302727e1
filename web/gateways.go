package web

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

const flowCriticalitiesMax = 100

// gatewaysView is the pools of all models, and the gateways that keep them.
type gatewaysView struct {
	Gateways []gatewayCard
	Pools    []poolCard
	Flows    []operator.FlowCriticality
	Live     int
	InFlight int64 // calls in flight
	Ceiling  int64 // calls that the slots held now allow at once
	Waiting  int64
	Refused  int64 // since the start of each gateway
	Legend   template.HTML
	Capped   bool

	MoreFlows bool // there may be more than flowCriticalitiesMax
}

// gatewayCard is a gateway with what its last heartbeat reported.
type gatewayCard struct {
	nodeCard
	Listen string
	Models int
}

// poolCard is a model's pool over all gateways.
type poolCard struct {
	operator.PoolShare
	Mode          string // the worst of its gateways: queue, cold, pass
	Meaning       string // of the mode
	InFlight      int64
	Ceiling       int64
	Held          int64
	Fill          template.HTML // of the ceiling by the calls in flight
	Criticalities []criticalityRow
	Waiting       int64
	Refusals      []refusal
	Members       []poolMember
	Instances     []holderInstance
	Settings      []fact
}

// criticalityRow is the requests of a criticality that wait.
type criticalityRow struct {
	Name    string
	Waiting int64
	Bar     template.HTML
}

// poolMember is a pool as one gateway sees it.
type poolMember struct {
	Gateway string
	poolReport
	Waits int64
}

// holderInstance is an instance with its slots by the kind of their holders.
type holderInstance struct {
	operator.Instance
	Grid, Data             template.HTML
	Online, Durable, Doubt int
}

// gatewayReport is the part of a gateway's heartbeat that pages display.
type gatewayReport struct {
	Listen string                `json:"listen"`
	Pools  map[string]poolReport `json:"pools"`
}

// poolReport is a pool in a heartbeat.
type poolReport struct {
	Mode     string           `json:"mode"`
	Ceiling  int64            `json:"ceiling"`
	InFlight int64            `json:"stock"` // as gateways of all versions name it
	Held     int64            `json:"held"`
	Waiting  map[string]int64 `json:"waiting"`
	Dropped  map[string]int64 `json:"dropped"`
}

// criticalities are those of online requests, the first served first.
var criticalities = []string{"critical", "default", "sheddable"}

// poolModes are the modes, the one that needs most attention first, with what they mean.
var poolModes = []struct{ name, meaning string }{
	{"cold", "no instance takes calls: requests wait until one has started"},
	{"queue", "there are more requests than slots: they wait by criticality and flow, and runs of entries may end " +
		"for them"},
	{"pass", "requests get a slot as they arrive"},
}

// dropMeanings are the reasons for which gateways end requests, in words.
var dropMeanings = map[string]string{
	"flow_queue_full":     "the flow has as many waiting requests as it may",
	"overloaded":          "the pool is full, or the wait would be too long",
	"evicted":             "made room for a request of more weight",
	"queue_timeout":       "waited as long as it may",
	"deadline_exceeded":   "the caller's own deadline passed",
	"no_endpoints":        "no instance, and none may start",
	"cold_start_timeout":  "no instance came up in time",
	"shutting_down":       "the gateway drains",
	"client_closed":       "the caller went away",
	"rate_limit_exceeded": "a limit of the token",
	"upstream_error":      "the worker broke before a byte",
}

func (d *Dashboard) gatewayPages() {
	d.page(page{
		path: "gateways", nav: "Gateways", section: "Fleet", title: "Gateways", template: "gateways", live: true,
		read: d.gateways,
	})
	d.verb(verb{
		name: "set_pool", title: "Set pool", role: administrator, objects: []string{"model"},
		fields: []field{{
			Name: "config", Label: "Settings", Kind: "textarea",
			Hint: `a JSON object laid over the defaults, such as {"total": 500, "reserved": 0.3}; empty: the defaults`,
		}},
		effect: "Replaces the settings of the model's pool. Gateways read them within two seconds; requests that " +
			"wait keep their places.",
		preview: d.poolPreview, do: d.setPool,
		next: func(form) string { return "gateways" },
	})
	d.verb(verb{
		name: "set_flow_criticality", title: "Set criticality of a flow", role: administrator,
		fields: []field{
			{Name: "flow", Label: "Flow", Kind: "text", Required: true},
			{
				Name: "criticality", Label: "Criticality", Kind: "select",
				Choices: append(slices.Clone(criticalities), "none of its own"),
				Value:   "default",
			},
		},
		effect: "Online requests of the flow that name no criticality are of this one, and none may name a higher one.",
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			criticality := in.Get("criticality")
			if !slices.Contains(criticalities, criticality) {
				criticality = ""
			}
			return fmt.Sprintf("The criticality of flow %q is set.", in.Get("flow")),
				d.change.SetFlowCriticality(ctx, in.Get("flow"), criticality, by)
		},
		next: func(form) string { return "gateways" },
	})
}

func (d *Dashboard) poolPreview(ctx context.Context, in form) (preview, error) {
	p, err := d.db.Pool(ctx, in.Get("model"))
	if err != nil {
		return preview{}, err
	}
	now := "the defaults"
	if p.Policy != nil {
		now = string(p.Policy)
	}
	return preview{Facts: []fact{
		{"settings now", now},
		{"slots", fmt.Sprint(p.Slots)},
		{"kept for online calls", fmt.Sprint(p.Reserved)},
		{"kept for durable entries", fmt.Sprint(p.BatchReserved)},
	}}, nil
}

func (d *Dashboard) setPool(ctx context.Context, in form, by invalidation.By) (string, error) {
	text := in.Get("config")
	var config []byte
	if text != "" {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal([]byte(text), &fields); err != nil {
			return "", fmt.Errorf("settings are no JSON object: %w", invalidation.ErrInvalid)
		}
		config = []byte(text)
	}
	return fmt.Sprintf("The pool of model %s is set.", in.Get("model")),
		d.change.SetGatewayPolicy(ctx, in.Get("model"), config, by)
}

func (d *Dashboard) gateways(ctx context.Context, _ query) (any, error) {
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := cached(ctx, d, "pools", beat, func(ctx context.Context) ([]operator.PoolShare, error) {
		return d.db.Pools(ctx, "", modelsMax)
	})
	if err != nil {
		return nil, err
	}
	instances, slots, err := d.slots(ctx)
	if err != nil {
		return nil, err
	}
	list := func(ctx context.Context) ([]operator.FlowCriticality, error) {
		return d.db.FlowCriticalities(ctx, "", flowCriticalitiesMax)
	}
	flows, err := cached(ctx, d, "flow criticalities", 5*beat, list)
	if err != nil {
		return nil, err
	}
	v := gatewaysView{
		Legend: picture.HolderLegend(), Flows: flows, MoreFlows: len(flows) >= flowCriticalitiesMax,
		Capped: len(pools) >= modelsMax || len(instances) >= instancesMax || len(slots) >= heldSlotsMax,
	}
	members := v.readGateways(nodes)
	rows := d.holderInstances(instances, slots, nodes)
	for _, p := range pools {
		card := poolCardOf(p, members[p.Model])
		card.Instances = rows[p.Model]
		v.Pools = append(v.Pools, card)
		v.InFlight, v.Ceiling, v.Waiting = v.InFlight+card.InFlight, v.Ceiling+card.Ceiling, v.Waiting+card.Waiting
		for _, r := range card.Refusals {
			v.Refused += r.Count
		}
	}
	rank := func(p poolCard) int {
		return slices.IndexFunc(poolModes, func(m struct{ name, meaning string }) bool { return m.name == p.Mode })
	}
	slices.SortStableFunc(v.Pools, func(a, b poolCard) int { // pools that no gateway serves have rank -1: the last
		byRank := cmp.Compare(uint(rank(a)), uint(rank(b))) //nolint:gosec // on purpose
		return cmp.Or(byRank, cmp.Compare(a.Model, b.Model))
	})
	return v, nil
}

// readGateways collects the gateways, and returns their pools by model. Pools of dead gateways hold no
// request any more.
func (v *gatewaysView) readGateways(nodes []operator.Node) map[string][]poolMember {
	members := map[string][]poolMember{}
	for _, n := range nodes {
		if n.Kind != "gateway" {
			continue
		}
		var r gatewayReport
		if json.Unmarshal(n.Load, &r) != nil {
			r = gatewayReport{} // of another version
		}
		v.Gateways = append(v.Gateways, gatewayCard{nodeCard: nodeCardOf(n), Listen: r.Listen, Models: len(r.Pools)})
		if n.State == "dead" {
			continue
		}
		v.Live++
		for _, model := range slices.Sorted(maps.Keys(r.Pools)) {
			m := poolMember{Gateway: n.Name, poolReport: r.Pools[model]}
			for _, waiting := range m.Waiting {
				m.Waits += waiting
			}
			members[model] = append(members[model], m)
		}
	}
	return members
}

func poolCardOf(p operator.PoolShare, members []poolMember) poolCard {
	card := poolCard{PoolShare: p, Members: members, Settings: settingsOf(p.Policy)}
	waiting, dropped := map[string]int64{}, map[string]int64{}
	worst := len(poolModes)
	for _, m := range members {
		card.InFlight, card.Ceiling, card.Held = card.InFlight+m.InFlight, card.Ceiling+m.Ceiling, card.Held+m.Held
		card.Waiting += m.Waits
		for criticality, n := range m.Waiting {
			waiting[criticality] += n
		}
		for reason, n := range m.Dropped {
			dropped[reason] += n
		}
		for rank, mode := range poolModes[:worst] {
			if mode.name == m.Mode {
				worst, card.Mode, card.Meaning = rank, mode.name, mode.meaning
			}
		}
	}
	if card.Ceiling > 0 {
		card.Fill = picture.Gauge{
			Title: "calls in flight of " + p.Model, Value: min(1, float64(card.InFlight)/float64(card.Ceiling)),
		}.HTML()
	}
	for _, criticality := range criticalities {
		row := criticalityRow{Name: criticality, Waiting: waiting[criticality]}
		share := 0.0
		if card.Waiting > 0 {
			share = float64(row.Waiting) / float64(card.Waiting)
		}
		row.Bar = picture.Gauge{Title: "waiting requests of criticality " + criticality, Value: share}.HTML()
		card.Criticalities = append(card.Criticalities, row)
	}
	for code, n := range dropped {
		if n > 0 {
			meaning := cmp.Or(dropMeanings[code], strings.ReplaceAll(code, "_", " "))
			card.Refusals = append(card.Refusals, refusal{code, meaning, n})
		}
	}
	slices.SortFunc(card.Refusals, func(a, b refusal) int {
		return cmp.Or(-cmp.Compare(a.Count, b.Count), cmp.Compare(a.Code, b.Code))
	})
	return card
}

// holderInstances draws the slots of each instance by the kind of their holders, by model.
func (d *Dashboard) holderInstances(
	instances []operator.Instance, slots []operator.Slot, nodes []operator.Node,
) map[string][]holderInstance {
	gateways := map[operator.NodeID]bool{}
	for _, n := range nodes {
		gateways[n.ID] = n.Kind == "gateway"
	}
	held := slotsByInstance(slots)
	rows := map[string][]holderInstance{}
	for _, i := range instances {
		row := holderInstance{Instance: i}
		grid := picture.SlotGrid{Title: "Slots by holder of " + i.Model + " " + i.Server}
		leased := held[instanceName{i.Model, i.Server}]
		grid.Slots = d.slotCells(i, leased)
		for number, s := range leased {
			state := picture.SlotDurable
			switch {
			case s.DoubtAt != nil:
				row.Doubt++
				continue
			case gateways[s.NodeID]:
				state = picture.SlotOnline
				row.Online++
			default:
				row.Durable++
			}
			if int(number) < len(grid.Slots) {
				grid.Slots[number].State = state
			}
		}
		row.Grid, row.Data = grid.HTML(), picture.Data(grid.Table())
		rows[i.Model] = append(rows[i.Model], row)
	}
	return rows
}
