package web

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale"
)

// scaleModes are the modes of deployments.
var scaleModes = []string{
	string(scale.Full), string(scale.UpOnly), string(scale.Manual), string(scale.Advise), string(scale.Disabled),
}

func (d *Dashboard) scaleVerbs() {
	one := []string{"deployment"}
	d.verb(verb{
		name: "override_deployment", title: "Override deployment", role: operatorRole, objects: one,
		fields: []field{
			{Name: "instances", Label: "Instances", Kind: "number", Required: true, Hint: "0 to 1,400"},
			{
				Name: "for", Label: "For", Kind: "text", Required: true, Value: "1h",
				Hint: "such as 30m or 2h; then the policy decides again",
			},
		},
		effect:  "The model gets this number of instances, whatever its policy says, until the time is over.",
		preview: d.deploymentPreview, do: d.overrideDeployment,
	})
	d.verb(verb{
		name: "end_override", title: "End override", role: operatorRole, objects: one,
		effect: "The policy decides again, from the next second on.", preview: d.deploymentPreview,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			err := d.change.SetScaleOverride(ctx, in.Get("deployment"), nil, time.Time{}, by)
			return fmt.Sprintf("The override of deployment %s is ended.", in.Get("deployment")), err
		},
	})
	d.verb(verb{
		name: "set_deployment", title: "Set deployment", role: administrator, objects: one,
		fields: []field{
			{Name: "mode", Label: "Mode", Kind: "select", Choices: append([]string{"as it is"}, scaleModes...)},
			{
				Name: "policy", Label: "Policy", Kind: "textarea",
				Hint: `a JSON object in place of the present one, such as {"min": 1, "max": 8, "slo_seconds": 30}; ` +
					`empty: as it is`,
			},
		},
		effect: "Mode advise publishes the number and changes nothing, up-only never removes an instance, manual " +
			"keeps the number, disabled does not decide.",
		preview: d.deploymentPreview, do: d.setDeployment,
	})
	d.verb(verb{
		name: "set_scaling", title: "Set switch of scaling", role: operatorRole,
		fields: []field{
			{
				Name: "switch", Label: "Switch", Kind: "select",
				Choices: []string{"scale.off", "scale.zero_off", "scale.max_all", "scale.budget"},
			},
			{
				Name: "value", Label: "Value", Kind: "text",
				Hint: "true or false; of scale.max_all a number of instances, of scale.budget a cost an hour; " +
					"empty: the switch is removed",
			},
		},
		effect: "It holds for all models at once: scale.off keeps every number as it is, scale.zero_off keeps the " +
			"last instance of each model, scale.max_all bounds each deployment, scale.budget the cost of all.",
		do: d.setScaling, next: func(form) string { return "autoscaler" },
	})
}

func (d *Dashboard) deploymentPreview(ctx context.Context, in form) (preview, error) {
	found, err := d.db.Deployment(ctx, in.Get("deployment"))
	if err != nil {
		return preview{}, err
	}
	p := preview{Facts: []fact{
		{"model", found.Model}, {"mode", found.Mode}, {"policy", policyFacts(found.Policy)},
	}}
	if s := found.State; s != nil {
		p.Facts = append(p.Facts,
			fact{"instances wanted", strconv.Itoa(s.Desired)}, fact{"ready", strconv.Itoa(s.Ready)})
	}
	if !found.Decides {
		p.Warning = "Another deployment of the model is filled first: its policy, mode and override count."
	}
	return p, nil
}

func (d *Dashboard) overrideDeployment(ctx context.Context, in form, by invalidation.By) (string, error) {
	n, err := in.Number("instances", 0, 1400)
	if err != nil {
		return "", err
	}
	lasts, err := in.Duration("for", time.Second)
	if err != nil {
		return "", err
	}
	until, err := d.change.At(ctx, operator.Moment{In: lasts})
	if err != nil {
		return "", err
	}
	instances := int(n)
	err = d.change.SetScaleOverride(ctx, in.Get("deployment"), &instances, until, by)
	return fmt.Sprintf("Deployment %s has %d instances for %s.", in.Get("deployment"), instances, lasts), err
}

func (d *Dashboard) setDeployment(ctx context.Context, in form, by invalidation.By) (string, error) {
	found, err := d.change.Deployment(ctx, in.Get("deployment"))
	if err != nil {
		return "", err
	}
	options := map[string]any{}
	if mode := in.Get("mode"); slices.Contains(scaleModes, mode) {
		options["mode"] = mode
	}
	if text := in.Get("policy"); text != "" {
		// It is stored as it was written: without the defaults, which may change.
		if _, err := scale.ParsePolicy([]byte(text)); err != nil {
			return "", fmt.Errorf("%s: %w", err.Error(), invalidation.ErrInvalid)
		}
		options["policy"] = json.RawMessage(text)
	}
	if len(options) == 0 {
		return "", fmt.Errorf("neither mode nor policy is given: %w", invalidation.ErrInvalid)
	}
	err = d.change.SetDeployment(ctx, found.Name, found.Model, options, by)
	return fmt.Sprintf("Deployment %s is set.", found.Name), err
}

func (d *Dashboard) setScaling(ctx context.Context, in form, by invalidation.By) (string, error) {
	name, text := in.Get("switch"), in.Get("value")
	var value any
	if text != "" {
		if err := json.Unmarshal([]byte(text), &value); err != nil {
			return "", fmt.Errorf("value is %q: want true, false, a number or nothing: %w",
				text, invalidation.ErrInvalid)
		}
	}
	return fmt.Sprintf("Switch %s is set.", name), d.change.SetScaleSettings(ctx, map[string]any{name: value}, by)
}
