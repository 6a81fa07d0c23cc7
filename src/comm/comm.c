/* SPDX-License-Identifier: Apache-2.0 */
/* What all providers share. */
#include "comm/comm.h"

void ferry__comm_close(ferry__comm **comm)
{
    if (!comm || !*comm)
        return;
    (*comm)->ops->close(*comm);
    *comm = NULL;
}
