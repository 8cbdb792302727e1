package gateway

import (
	"maps"
	"net/http"
	"slices"
)

// listModels answers with the models that the caller may use, and their adapters, as OpenAI does.
func (g *Gateway) listModels(w http.ResponseWriter, r *http.Request) {
	c, err := g.authenticate(r)
	if err != nil {
		AnswerError(w, err)
		return
	}
	list := modelList{Object: "list", Data: []modelObject{}}
	routes := g.models.named()
	for _, name := range slices.Sorted(maps.Keys(routes)) {
		if model := routes[name].model; c == nil || c.mayUse(model.Name) {
			list.Data = append(list.Data, objectOf(name, model))
		}
	}
	AnswerJSON(w, r, http.StatusOK, list)
}

type modelList struct {
	Object string        `json:"object"`
	Data   []modelObject `json:"data"`
}

type modelObject struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func objectOf(name string, m *ModelState) modelObject {
	return modelObject{ID: name, Object: "model", Created: max(0, m.Created.Unix()), OwnedBy: "penstock"}
}

func (g *Gateway) oneModel(w http.ResponseWriter, r *http.Request) {
	c, err := g.authenticate(r)
	name := r.PathValue("id")
	route := g.models.route(name)
	switch {
	case err != nil:
		AnswerError(w, err)
	case route == nil || (c != nil && !c.mayUse(route.model.Name)):
		AnswerError(w, unknownModel(name))
	default:
		AnswerJSON(w, r, http.StatusOK, objectOf(name, route.model))
	}
}
