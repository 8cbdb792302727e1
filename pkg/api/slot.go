package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) slotRoutes() {
	add(a, route{
		method: "GET", path: "/v1/slots", id: "list-slots", summary: "Slots that are held, oldest lease first",
		scope: read, of: ofModel,
	}, a.listSlots)
	add(a, route{
		method: "GET", path: "/v1/slots/dead", id: "list-dead-slots",
		summary: "Slots that nodes hold whose lease has lapsed", scope: read, of: ofModel,
	}, a.listDeadSlots)
	add(a, route{
		method: "POST", path: "/v1/models/{model}/slots/free", id: "free-dead-slots",
		summary: "Free the slots of dead nodes at once, without waiting until their workers report no such calls",
		scope:   operate, of: ofModel,
	}, a.freeDeadSlots)
	change(a, route{
		method: "PUT", path: "/v1/device-groups/{name}", id: "set-device-group",
		summary: "Set the slots that the instances of a device group have together", scope: admin, of: ofPlatform,
	}, func(ctx context.Context, in *struct {
		Name string `path:"name" maxLength:"200"`
		Body struct {
			ReasonBody
			Slots int `json:"slots" minimum:"0" maximum:"1000000" doc:"With 0 they have as many as the largest instance of the group."`
		}
	},
	) error {
		return a.operator.SetDeviceGroup(ctx, in.Name, in.Body.Slots, in.Body.by(ctx))
	})
}

func (a *API) listSlots(ctx context.Context, in *modelFilter) (*answer[list[operator.Slot]], error) {
	return paged(in.Paging, func(after int64, limit int) ([]operator.Slot, error) {
		return a.operator.Slots(ctx, in.Model, after, limit)
	}, func(s operator.Slot) int64 { return s.Token })
}

func (a *API) listDeadSlots(ctx context.Context, in *modelFilter) (*answer[list[operator.DeadSlots]], error) {
	return paged(in.Paging, func(after operator.DeadSlotsKey, limit int) ([]operator.DeadSlots, error) {
		return a.operator.DeadSlots(ctx, in.Model, after, limit)
	}, func(s operator.DeadSlots) operator.DeadSlotsKey {
		return operator.DeadSlotsKey{Model: s.Model, Server: s.Server, NodeID: s.NodeID}
	})
}

type slotsToFree struct {
	InModel
	Body struct {
		ReasonBody
		Server string `json:"server,omitempty" maxLength:"200" doc:"Of this instance; of all if absent."`
	}
}

type freed struct {
	Freed int `json:"freed"`
}

func (a *API) freeDeadSlots(ctx context.Context, in *slotsToFree) (*answer[freed], error) {
	n, err := a.operator.FreeDeadSlots(ctx, in.Model, in.Body.Server, in.Body.by(ctx))
	return answered(freed{n}, err)
}
