/* SPDX-License-Identifier: Apache-2.0 */
/* Questions to all ranks outside a round: digests, plans, reset. */
#include "base/alloc.h"
#include "serve/control.h"
#include "serve/rank_call.h"

#include <jansson.h>

static ferry_status gather(ferry__server *s, ferry__rank_kind kind,
                           ferry__answers *a)
{
    FERRY_TRY(ferry__answers_open(s, a));
    FERRY_TRY(ferry__rank_call_wait_up(s));
    return ferry__rank_call(s, kind, NULL, a);
}

/* Ends an object of what the ranks answered, or lets go of it. */
static ferry_status end_object(ferry__server *s, ferry__answers *a,
                               ferry_status st, ferry__str *out,
                               char **out_json)
{
    ferry__str_append(out, "}");
    ferry__answers_close(s, a);
    if (st < 0) {
        ferry__str_free(out);
        return st;
    }
    return ferry__str_take(out, out_json);
}

ferry_status ferry__control_checksums_inside(ferry__server *s, char **out_json)
{
    ferry__answers a = {0};
    ferry__str out = {0};
    ferry_status st = gather(s, FERRY__RANK_CHECKSUM, &a);

    ferry__str_append(&out, "{");
    for (int32_t i = 0; st == FERRY_OK && i < ferry__rank_world(s); i++) {
        json_t *o = json_loadb(a.bodies[i], a.sizes[i], 0, NULL);
        const char *name;
        json_t *hex;

        json_object_foreach(o, name, hex)
        {
            ferry__str_printf(&out, "%s\"dp%d:pp0:pcp0:tp%d:%s\":\"%s\"",
                              out.length > 1 ? "," : "",
                              i / s->options->tp_size, i % s->options->tp_size,
                              name, json_string_value(hex));
        }
        json_decref(o);
    }
    return end_object(s, &a, st, &out, out_json);
}

ferry_status ferry__control_checksums(ferry__server *s, char **out_json)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_ask_begin(s, "weight_checker"));
    st = ferry__control_checksums_inside(s, out_json);
    ferry__rank_call_end(s);
    return st;
}

static ferry_status plan_inside(ferry__server *s, char **out_json)
{
    ferry__answers a = {0};
    ferry__str out = {0};
    ferry_status st = gather(s, FERRY__RANK_PLAN, &a);

    ferry__str_append(&out, "{");
    for (int32_t i = 0; st == FERRY_OK && i < ferry__rank_world(s); i++) {
        ferry__str_printf(&out, "%s\"dp%d:tp%d\":", i > 0 ? "," : "",
                          i / s->options->tp_size, i % s->options->tp_size);
        ferry__str_append_n(&out, a.bodies[i], a.sizes[i]);
    }
    return end_object(s, &a, st, &out, out_json);
}

ferry_status ferry__control_plan(ferry__server *s, char **out_json)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_ask_begin(s, "plan"));
    st = plan_inside(s, out_json);
    ferry__rank_call_end(s);
    return st;
}

ferry_status ferry__control_reset(ferry__server *s)
{
    ferry_status st;

    FERRY_TRY(ferry__rank_call_begin(s, "weight_checker"));
    if (s->round_open) {
        st = ferry_fail(FERRY_EORDER, "reset refused: a weight update is "
                                      "active");
    } else {
        for (int32_t i = 0; i < s->options->dp_size; i++)
            ferry__replica_gate_close(&s->replicas[i]);
        st = ferry__rank_call(s, FERRY__RANK_RESET, NULL, NULL);
        pthread_mutex_lock(&s->lock);
        s->content++;
        pthread_mutex_unlock(&s->lock);
        for (int32_t i = 0; i < s->options->dp_size; i++)
            ferry__replica_gate_open(&s->replicas[i]);
    }
    ferry__rank_call_end(s);
    return st;
}
